"""The sections `model`, `head`, `optimizer` and `mesh`."""

from typing import Any, Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, StrictBool, field_validator, model_validator

from mllm.config.section import Section, impossible

LoraTarget = Literal["q", "k", "v", "o", "gate", "up", "down", "qkv", "z", "beta", "decay", "out", "head"]
PEFT_NAMES = {f"{name}_proj": name for name in ("q", "k", "v", "o", "gate", "up", "down", "out")} | {"lm_head": "head"}
PEFT_NAMES |= {"in_proj_qkv": "qkv", "in_proj_z": "z", "in_proj_b": "beta", "in_proj_a": "decay"}
"""The products by PEFT's names."""


class LoraConfig(Section):
    """Low-rank adapters (Hu et al. 2021, arXiv:2106.09685). Only the adapters are trained.

    The matrix W becomes W + s b a, where a is [rank, in] and b is [out, rank].
    """

    source: str | None = None
    """Adapters to continue from: a folder in PEFT's format, also in a bucket, or a hub id. None: new adapters, with b
    = 0."""
    rank: PositiveInt | None = None
    """The smaller dimension of a and b. Default: the source's rank; required without a source."""
    alpha: PositiveFloat | None = None
    """The scale s is alpha / rank. Default: the source's alpha; required without a source."""
    rslora: StrictBool | None = None
    """The scale s is alpha / sqrt(rank) (Kalajdzievski 2023, arXiv:2312.03732). Default: as the source, or false."""
    targets: tuple[LoraTarget, ...] | None = None
    """The matrices with an adapter; PEFT's names (`q_proj`) work as well. Attention: q, k, v, o. Delta net: qkv, z,
    beta, decay, out. Feed-forward: gate, up, down. Vocabulary: head. Default: the source's, or all except head."""
    base: Literal["int8"] | None = None
    """The dtype of the layers' frozen matrices, in training and sampling. `int8` has a scale per row and half of
    bfloat16's memory, and is a slightly different model. None: `model.dtype`."""

    @field_validator("targets", mode="before")
    @classmethod
    def read_names(cls, given: Any) -> Any:
        """Accept PEFT's names."""
        return [PEFT_NAMES.get(str(name), name) for name in given] if isinstance(given, list | tuple) else given

    @model_validator(mode="after")
    def check(self) -> Self:
        if self.targets is not None and len({*self.targets}) < max(1, len(self.targets)):
            raise impossible("targets", "name at least one product, and each once")
        for name in ("rank", "alpha"):
            if self.source is None and getattr(self, name) is None:
                raise impossible(name, "this setting is required, or lora.source")
        return self


class ModelConfig(Section):
    """The model that is trained."""

    source: str | None = None
    """A folder in Hugging Face's layout or another run's `run_dir`, both also in a bucket, or a hub id."""
    step: int | str | None = None
    """The checkpoint, if the source is a run: `newest`, `best` (of a run with `checkpoint.keep_best`), or the number of
    a step; None: the newest. The run's config.yaml records the number. Not with init random."""
    revision: str | None = Field(default=None, pattern=r"^[\w.-]+$")
    """The commit or branch of a hub id; None: the default branch. The run's config.yaml records the commit."""
    init: Literal["pretrained", "random"] = "pretrained"
    """Initial parameters: the source's (`pretrained`, which needs a source) or random."""
    architecture: dict[str, Any] | None = None
    """The keys of Hugging Face's config.json for a new model, in place of `source`; only with init random."""
    tokenizer: str | None = None
    """A folder, also in a bucket, or a hub id, or `bytes`. Default: the source's, or `bytes` with an `architecture`."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """The dtype of activations and of the operands of matrix products; the residual stream is float32."""
    param_dtype: Literal["float32", "bfloat16"] = "float32"
    """The dtype of the parameters that the optimizer updates; not with `lora`: adapters are float32."""
    compute_rounding: Literal["dithered", "nearest"] = "dithered"
    """How float32 parameters are rounded to bfloat16 for matrix products. `nearest` hides updates until a weight has
    moved by half the distance between two bfloat16 numbers. `dithered` rounds a weight up if its fraction of that
    distance exceeds the weight's fixed threshold. Only with dtype bfloat16, and float32 parameters or `lora`."""
    remat: Literal["auto", "products", "full"] = "auto"
    """Activations of a layer that the backward pass recomputes: all (`full`), or all but the results of matrix
    products (`products`). `auto`: `products` if they fit in memory, else `full`; on TPUs always `full`. The choice is
    written to the run's config.yaml, and a resume keeps it."""
    lora: LoraConfig | None = None
    """Train low-rank adapters. The model's own parameters are frozen, in `dtype` or `lora.base`."""
    attention: Literal["xla"] | None = None
    """The implementation of attention and of delta nets. None: over whole sequences splash attention on TPUs and
    cuDNN's on NVIDIA GPUs; on Hopper GPUs the project's own kernels for packed rows, heads of 256, decode steps and
    delta nets; XLA's where no kernel can run (see attention.py, delta_kernel.py and paged_attention.py). A GPU without
    cuDNN's library needs `xla`."""

    @model_validator(mode="after")
    def check(self) -> Self:
        if self.init == "pretrained":
            if self.source is None:
                raise impossible("source", "give a local folder or a hub id, or set model.init=random")
            if self.architecture is not None:
                raise impossible("architecture", "the source has its own: set model.init=random to make a new model")
        elif (self.source is None) == (self.architecture is None):
            raise impossible("architecture", "init: random takes either a source or an architecture")
        if isinstance(self.step, str) and self.step not in ("newest", "best"):
            raise impossible("step", f"{self.step!r} is none of newest, best and the number of a step")
        return self


class HeadConfig(Section):
    """How the loss is computed from hidden states; docs/head.md has the details."""

    impl: Literal["full_logits", "chunked_logits", "xla", "mosaic_tpu", "mosaic_gpu"] | None = None
    """How it is computed; None: the fastest that runs on this device without making [tokens, vocabulary] logits."""
    workspace_mib: int | None = Field(default=None, ge=0)
    """Memory for kept logits in the loss; 0: logits are computed twice; None: the head chooses. `full_logits`,
    DPO, GSPO and importance weights of whole completions don't use it."""


class OptimizerConfig(Section):
    """How the parameters are updated, by AdamW (Loshchilov and Hutter 2019)."""

    learning_rate: PositiveFloat
    """The highest learning rate, which the warm-up ends with."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rate falls after the warm-up, to `final_fraction` of itself at the last step."""
    warmup_steps: int = Field(default=0, ge=0)
    """Updates over which the learning rate rises, as part of `steps`."""
    final_fraction: float = Field(default=0.0, ge=0, le=1)
    """The last learning rate over the highest; not with schedule constant."""
    b1: float = Field(default=0.9, ge=0, lt=1)
    """AdamW's decay rate of the mean gradient."""
    b2: float = Field(default=0.99, ge=0, lt=1)
    """AdamW's decay rate of the mean squared gradient."""
    eps: PositiveFloat = 1e-8
    """Added to the root of the mean squared gradient."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Applies to matrices, never to norms and biases."""
    moment_dtype: Literal["bfloat16"] | None = None
    """The dtype of the moments, rounded stochastically; None: the parameters' dtype. Not with `model.param_dtype`
    bfloat16, which includes the moments."""
    max_grad_norm: PositiveFloat | None = 1.0
    """The largest global norm of the gradient; a larger gradient is scaled down. None: no limit."""
    max_skipped: int = Field(default=10, ge=0)
    """The most updates in a row that may be skipped because the loss or a gradient isn't finite; one more ends the
    run."""


class MeshConfig(Section):
    """The number of devices along each mesh axis. The product of the axes is the number of devices that are used."""

    dp: PositiveInt = 1
    """Data parallel: devices split a batch, each with all parameters."""
    fsdp: int = Field(default=-1, ge=-1)
    """Fully sharded: devices split a batch, the parameters and the optimizer's state. -1: the devices that dp and tp
    leave."""
    tp: PositiveInt = 1
    """Tensor parallel: devices split every matrix product; divides the model's numbers of heads."""

    @model_validator(mode="after")
    def check(self) -> Self:
        if self.fsdp == 0:
            raise impossible("fsdp", "give 1 or more, or -1 for all devices that dp and tp leave")
        return self
