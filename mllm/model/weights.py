"""Reads and writes Hugging Face's safetensors by the table of parameters in layout.py, without torch.

Each process reads only its devices' parameters, and a share of parameters of several processes. Code in the folder is
never run.
Quantized checkpoints, and saving from several processes, are left out.
"""

import gc
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec, Sharding
from jax.typing import DTypeLike
from safetensors.numpy import save_file
from tqdm import tqdm

from mllm.config.task import Form
from mllm.errors import UserError
from mllm.model.architecture import Architecture
from mllm.model.compute_copy import Rounding, compute_copy
from mllm.model.folder import read_json, replacing, write_json
from mllm.model.int8 import Int8Matrix, is_int8, quantize
from mllm.model.layout import TENSORS, Params, map_parameters, parameter_name
from mllm.model.original import Original
from mllm.model.tensors import CONVOLUTION, INDEX, LEARNED, SINGLE, Tensor, open_tensors, texts_part
from mllm.progress import transfer_bar

STORED_DTYPES = {"F32": 4, "BF16": 2, "F16": 2}
"""The dtypes that can be read, with their bytes per number."""
SHARD_BYTES = 2_000_000_000
"""The limit to the tensors in a saved file; a larger tensor gets a file of its own."""
narrow = jax.jit(compute_copy, static_argnames=("rounding", "name"))
is_finite = jax.jit(lambda array: jnp.isfinite(array).all())


def read_config(folder: Path) -> Architecture:
    """The sizes in the folder's config.json; UserError where it is missing, or no model that `Decoder` implements."""
    path = folder / "config.json"
    if not path.is_file():
        raise UserError(f"{path}: missing; a checkpoint in Hugging Face's layout has it")
    return Architecture.from_hf(read_json(path), where=str(path))


def load(
    folder: Path,
    abstract: Params,
    config: Architecture,
    tensors: Mapping[str, Tensor] | None = None,
    described: str = "config.json",
) -> nnx.State:
    """Read the parameters, as the tree of `nnx.split(model)[1]`; all names and shapes are checked first.

    The parameters get the dtypes and mesh shardings of `abstract`, the same tree with `jax.ShapeDtypeStruct`s or an
    `Int8Matrix` of them. They are read from `tensors`; default: all tensors of the folder. Errors name `described`, the
    file that needs the tensors. UserError is raised for a file that is missing, damaged or outside the folder. It is
    also raised for a tensor that is missing, surplus, quantized, of the wrong shape or not finite. A tied model's head
    is surplus unless it equals the embedding.
    """
    tensors = open_tensors(folder) if tensors is None else tensors
    texts = texts_part(tensors)
    if (left_out := len(tensors) - len(texts)) and jax.process_index() == 0:
        print(f"{folder}: {left_out} tensors are not of the language model and are left out", file=sys.stderr)
    tensors = texts
    check(tensors, {name: shape for name, shape, *_ in tensors_of(abstract, config)}, folder, described)
    with transfer_bar(f"loading {folder.name}", stored_bytes(tensors.values())) as bar:

        def read(leaf: Any, name: str) -> Any:
            return read_parameter(tensors, TENSORS[name], leaf, layers_of(name, config), bar)

        return map_parameters(read, abstract)


def read_parameter(tensors: Mapping[str, Tensor], pattern: str, leaf: Any, layers: Sequence[int], bar: tqdm) -> Any:
    """One parameter on its devices. Stacked layers pass through the host, and become int8, one by one."""
    shardings = jax.tree.map(lambda x: x.sharding, leaf)
    sharding = shardings.values if isinstance(shardings, Int8Matrix) else shardings
    assert isinstance(sharding, NamedSharding)
    if "{}" not in pattern:
        return read_tensor(tensors[pattern], sharding, bar).astype(leaf.dtype)
    layer_sharding = NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[1:]))
    stacked = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype, device=x.sharding), leaf)
    for index, layer in enumerate(layers):
        tensor = read_tensor(tensors[pattern.format(layer)], layer_sharding, bar)
        stacked = put_layer(stacked, tensor, index, sharding=shardings)
    return stacked


@partial(jax.jit, static_argnames="sharding", donate_argnums=0)
def put_layer(stacked: Any, tensor: jax.Array, layer: jax.Array | int, *, sharding: Sharding | Int8Matrix) -> Any:
    """The stacked parameter with one layer's tensor in its place; it reuses the memory of `stacked`."""
    values = quantize(tensor) if is_int8(stacked) else tensor.astype(stacked.dtype)
    put = partial(jax.lax.dynamic_update_index_in_dim, index=layer, axis=0)
    return jax.lax.with_sharding_constraint(jax.tree.map(put, stacked, values), sharding)


def read_tensor(tensor: Tensor, sharding: Sharding, bar: tqdm) -> jax.Array:
    """The tensor on its devices in its stored dtype; UserError where a number is not finite.

    The host never holds more of it than the file does.
    """
    blocks: dict[str, np.ndarray] = {}

    def block(index: tuple[slice, ...] | None) -> np.ndarray:
        assert index is not None
        # Devices with copies of the same block share one read.
        if str(index) not in blocks:
            blocks[str(index)] = tensor[index]
        return blocks[str(index)]

    array = jax.block_until_ready(jax.make_array_from_callback(tensor.shape, sharding, block))
    blocks.clear()
    gc.collect(0)  # JAX releases the host's copy only then
    bar.update(stored_bytes([tensor]))
    if not is_finite(array):
        fault = f"tensor {tensor.name} has numbers that are not finite"
        raise UserError(f"{tensor.file}: {fault}; fetch or export it again")
    return array


def stored_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(math.prod(tensor.shape) * STORED_DTYPES[tensor.stored.get_dtype()] for tensor in tensors)


def check(tensors: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]], folder: Path, described: str) -> None:
    """Raise UserError unless the tensors have the names and shapes of `shapes`, and dtypes that can be read."""
    for name, shape in shapes.items():
        if name not in tensors:
            raise UserError(f"{folder}: tensor {name} is missing; {described} asks for it")
        stored, where = tensors[name].stored, f"{tensors[name].file}: tensor {name}"
        if tensors[name].shape != shape:
            raise UserError(f"{where} has shape {stored.get_shape()}; by {described} it must be {list(shape)}")
        if stored.get_dtype() not in STORED_DTYPES:
            raise UserError(f"{where} is stored as {stored.get_dtype()}; only {', '.join(STORED_DTYPES)} can be read")
    surplus = sorted(tensors.keys() - shapes.keys())
    if surplus == [TENSORS["head"]]:
        # A tied model doesn't need a head; some programs save the embedding again.
        head, embed = (tensors[TENSORS[name]] for name in ("head", "embed"))
        formats = [(tensor.shape, tensor.stored.get_dtype()) for tensor in (head, embed)]
        if formats[0] != formats[1] or not np.array_equal(head[:, :], embed[:, :]):
            fault = f"tensor {head.name} is not the embedding, but config.json says tie_word_embeddings"
            raise UserError(f"{head.file}: {fault}: set that to false, or remove the tensor")
    elif surplus:
        raise UserError(f"{tensors[surplus[0]].file}: tensor {surplus[0]} is not part of this model")


def save(
    place: str | Path,
    config: Architecture,
    params: nnx.State,
    *,
    dtype: DTypeLike = jnp.bfloat16,
    dithered: bool = False,
    stop_ids: Sequence[int] = (),
    stop_texts: Sequence[str] = (),
    pad_id: int | None = None,
    bos_id: int | None = None,
    learned: Form | None = None,
    also: Callable[[Path], object] | None = None,
    original: Original | None = None,
) -> None:
    """Write a folder, of a disk or a bucket, that transformers loads; the host holds one shard at a time.

    Matrices are a run's compute copies if `dithered` says how they are rounded. An earlier export there is
    replaced as `replacing` says. `also` writes further files into the folder (`save_tokenizer`). With an `original` the
    folder equals the original's but for these parameters. UserError is raised as by `replacing`.
    """
    with replacing(place) as unfinished:
        write_tensors(unfinished, params, Rounding(jnp.dtype(dtype), dithered), config, original=original)
        if also is not None:
            also(unfinished)
        write_settings(unfinished, config, dtype, stop_ids, stop_texts, pad_id, bos_id, learned, original)


def write_settings(
    folder: Path,
    config: Architecture,
    dtype: DTypeLike,
    stop_ids: Sequence[int] = (),
    stop_texts: Sequence[str] = (),
    pad_id: int | None = None,
    bos_id: int | None = None,
    learned: Form | None = None,
    original: Original | None = None,
) -> None:
    """Write config.json with the form that the model has learned, and generation_config.json with its stop tokens.

    config.json has the tokenizer's ids if they are known, or null for a missing id, to override the class's defaults.
    """
    settings: dict[str, Any] = {LEARNED: learned} if learned == "texts" else {}
    if stop_ids:
        eos = [*stop_ids] if len(stop_ids) > 1 else stop_ids[0]
        settings |= {"bos_token_id": bos_id, "eos_token_id": eos, "pad_token_id": pad_id}
    settings = config.to_hf() | {"torch_dtype": str(np.dtype(dtype))} | settings
    write_json(folder / "config.json", original.copy_settings(folder, settings) if original else settings)
    ends = {"eos_token_id": list(stop_ids), "pad_token_id": pad_id, "stop_strings": list(stop_texts)}
    write_json(folder / "generation_config.json", {k: v for k, v in ends.items() if v not in (None, [])})


def write_tensors(
    folder: Path,
    params: nnx.State,
    rounding: Rounding,
    config: Architecture,
    single: str = SINGLE,
    original: Original | None = None,
) -> None:
    """Write the safetensors file `single`, or several files and an index if a model is large."""
    shards: list[dict[str, Callable[[], np.ndarray]]] = [{}]
    total = used = 0
    for tensor, size, read in written_tensors(params, rounding, config, original):
        if single == SINGLE and shards[-1] and used + size > SHARD_BYTES:
            shards.append({})
            used = 0
        shards[-1][tensor] = read
        used, total = used + size, total + size

    files: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = single if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        files |= dict.fromkeys(shard, file)
        save_file({tensor: read() for tensor, read in shard.items()}, folder / file, metadata={"format": "pt"})
    if len(shards) > 1:
        write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": files})


def written_tensors(
    params: nnx.State, rounding: Rounding, config: Architecture, original: Original | None
) -> Iterator[tuple[str, int, Callable[[], np.ndarray]]]:
    """The tensors of an export: name, bytes, and its reader. Vectors that the original has in float32 stay so."""

    def read(tensor: str, parameter: Any, index: Any, rounding: Rounding, name: str) -> np.ndarray:
        layer = 0 if index is ... else index
        return as_stored(np.asarray(narrow(parameter[index], rounding, name, layer)), tensor)

    for tensor, shape, parameter, index, name in tensors_of(params, config):
        wide = original is not None and len(shape) == 1 and tensor in original.wide
        rounded = Rounding(jnp.dtype(jnp.float32)) if wide else rounding
        size = math.prod(shape) * rounded.dtype.itemsize
        exported_name = original.name(tensor) if original else tensor
        yield exported_name, size, partial(read, tensor, parameter, index, rounded, name)
    for exported_name, stored in original.others.items() if original else ():
        yield exported_name, stored_bytes([stored]), partial(stored.stored.__getitem__, slice(None))


def as_stored(array: np.ndarray, tensor: str) -> np.ndarray:
    """The array with the dims that the tensor of this name has."""
    return array[:, None] if tensor.endswith(CONVOLUTION) else array


def layers_of(name: str, config: Architecture) -> tuple[int, ...]:
    """The indices of the layers that are stacked in the parameter `name`; empty for a parameter outside the layers."""
    return config.layers_of(name.partition(".")[0])


def tensors_of(params: nnx.State, config: Architecture) -> Iterator[tuple[str, tuple[int, ...], Any, Any, str]]:
    """The tensors of a checkpoint of `params`: name, shape, the parameter and index of its values, and its name."""
    for path, parameter in jax.tree_util.tree_leaves_with_path(params, is_leaf=is_int8):
        name, shape = parameter_name(path), parameter.shape
        tensor = TENSORS[name]
        if "{}" not in tensor:
            yield tensor, shape, parameter, ..., name
            continue
        for index, layer in enumerate(layers_of(name, config)):
            yield tensor.format(layer), shape[1:], parameter, index, name
