"""The bytes that a turn of a compiled program's largest loop moves, from the compiler's text of the program.

An instruction reads each operand and writes its result; a slice reads what it takes, and an update in place writes what
changes. Arrays in a TPU's VMEM, memory space 1, are not counted: what copies them there is. A loop inside is counted as
often as it runs, if the text says so.
"""

import math
import re
from dataclasses import dataclass

BITS = {"pred": 8, **{f"{kind}{bits}": bits for kind in "suf" for bits in (4, 8, 16, 32, 64)}, "bf16": 16}
FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "iota"}
"""Instructions that move nothing."""
SLICES = {"dynamic-slice", "slice", "gather"}
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?(\S+) \([^\n]*\) -> [^\n]*\{\n(.*?)^\}", re.MULTILINE | re.DOTALL)
_INSTRUCTION = re.compile(r"^\s*(ROOT )?%?(\S+) = (.*?) ([a-z][\w\-]*)\((.*)$", re.MULTILINE)
_COMMENT = re.compile(r"/\*.*?\*/")
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\](?:\{([^}]*)\})?")


@dataclass(frozen=True)
class Instruction:
    name: str
    kind: str
    result: str
    """The type of the result, as in the text."""
    operands: tuple[str, ...]
    rest: str
    """All that follows the kind."""
    is_root: bool


class Module:
    """The computations of a program, by their names."""

    def __init__(self, text: str) -> None:
        self.computations = {name: instructions(body) for name, body in _COMPUTATION.findall(_COMMENT.sub("", text))}

    def largest_loop(self) -> int:
        """The most bytes that a turn of one of the loops moves; 0 where there is no loop."""
        loops = [i for body in self.computations.values() for i in body.values() if i.kind == "while"]
        return max((self.computation(called(loop, "body")) for loop in loops), default=0)

    def computation(self, name: str) -> int:
        """The bytes that a computation's instructions move."""
        body = self.computations[name]
        return sum(self.instruction(instruction, body) for instruction in body.values())

    def instruction(self, one: Instruction, body: dict[str, Instruction]) -> int:
        """The bytes that an instruction of a computation moves."""
        kind = one.kind
        if kind == "while":
            turns = re.search(r'known_trip_count":\{"n":"(\d+)"', one.rest)
            return int(turns[1] if turns else 1) * self.computation(called(one, "body"))
        if kind == "call":
            return self.computation(called(one, "to_apply"))
        if kind in FREE or kind.endswith(("-done", "-update")):
            return 0
        operands = [body[name].result for name in one.operands if name in body]
        if kind.endswith("-start"):  # a copy to or from VMEM; its result names both sides and a counter
            sides = [array for array in _ARRAY.findall(one.result) if array[1]]
            moved = min((bytes_of(dtype, shape) for dtype, shape, _ in sides), default=0)
            return moved if "S(1)" in one.result else 2 * moved
        if kind == "dynamic-update-slice":
            return 2 * size(operands[1])
        if kind in SLICES:
            return 2 * size(one.result)
        if kind != "fusion":
            return sum(map(size, operands)) + size(one.result)
        return self.fusion(one, operands)

    def fusion(self, one: Instruction, operands: list[str]) -> int:
        """The bytes that a fusion reads of its operands, and writes."""
        inside = self.computations[called(one, "calls")]
        written, in_place = 0, set()
        root = next(i for i in inside.values() if i.is_root)
        for name in root.operands if root.kind == "tuple" else (root.name,):
            output = source(inside[name], inside)
            if output.kind == "dynamic-update-slice":
                in_place.add(source(inside[output.operands[0]], inside).name)
                written += size(inside[output.operands[1]].result, anywhere=True) if size(one.result) else 0
            else:
                written += size(one.result) if root.kind != "tuple" else size(inside[name].result)
        read = 0
        for parameter in (i for i in inside.values() if i.kind == "parameter"):
            operand = operands[int(parameter.rest.split(")")[0])]
            users = [i for i in inside.values() if parameter.name in i.operands]
            if parameter.name in in_place or not size(operand):
                continue
            if users and all(user.kind in SLICES and user.operands[0] == parameter.name for user in users):
                read += sum(min(size(user.result, anywhere=True), size(operand)) for user in users)
            else:
                read += size(operand)
        return read + written


def instructions(body: str) -> dict[str, Instruction]:
    """The instructions of a computation, by their names."""
    found = {}
    for root, name, result, kind, rest in _INSTRUCTION.findall(body):
        operands = tuple(re.findall(r"%([\w.\-]+)", rest.partition(")")[0]))
        found[name] = Instruction(name, kind, result, operands, rest, bool(root))
    return found


def source(one: Instruction, inside: dict[str, Instruction]) -> Instruction:
    """The instruction whose result this one only renames."""
    while one.kind in ("bitcast", "copy", "convert") and one.operands and one.operands[0] in inside:
        one = inside[one.operands[0]]
    return one


def called(one: Instruction, key: str) -> str:
    """The name of the computation that an instruction calls."""
    found = re.search(rf"\b{key}=%?([\w.\-]+)", one.rest)
    assert found is not None
    return found[1]


def size(types: str, anywhere: bool = False) -> int:
    """The bytes of the arrays in a type; those in VMEM only if they count `anywhere`."""
    arrays = _ARRAY.findall(types)
    return sum(bytes_of(dtype, shape) for dtype, shape, layout in arrays if anywhere or "S(1)" not in layout)


def bytes_of(dtype: str, shape: str) -> int:
    return BITS.get(dtype, 0) * math.prod(map(int, filter(None, shape.split(",")))) // 8
