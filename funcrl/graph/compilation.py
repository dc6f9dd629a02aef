"""A step traced, rewritten and compiled: the only place that names torch.compile."""

import hashlib
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias
from uuid import uuid4

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx._pytree import tree_flatten_spec
from torch.fx.graph import CodeGen
from torch.utils._pytree import tree_unflatten

from funcrl.config.generation import CompileConfig
from funcrl.core import tree
from funcrl.core.arguments import checked
from funcrl.core.types import Metrics, Rows, Step, TrainState
from funcrl.graph.aliases import written_inputs
from funcrl.graph.capture import Program, capture
from funcrl.graph.donation import check_own_memory
from funcrl.graph.gathers import gather_late
from funcrl.graph.lowering import (
    add_fences,
    embedding_by_kernel,
    scalars_as_elements,
    select_for_scatter,
    start_workers,
)
from funcrl.graph.nodes import as_module, copied, is_free, is_uncompiled
from funcrl.graph.per_sample import fuse_per_sample
from funcrl.graph.regions import split_repeated
from funcrl.graph.remat import remat
from funcrl.graph.tracing import trace, without_collection

Update: TypeAlias = Callable[[TrainState, Rows], tuple[TrainState, Metrics]]
# The structure of a state and a batch, and the shape of every leaf.
_Shapes: TypeAlias = tuple[Any, tuple[tuple[Any, ...], ...]]
_VECTOR_BITS = {"AVX2": 256, "AVX512": 512}


@checked
def compile_step(
    step: Step,
    state: TrainState,
    batch: Rows,
    config: CompileConfig | None = None,
    graph: GraphModule | None = None,
) -> Step:
    """Return the same step as one compiled program: same arguments, same numbers.

        trace -> fuse_per_sample -> remat -> split_repeated -> torch.compile -> CUDA graph

    A program is of one shape. The first is traced here and compiled at its first call, its
    repeated layers once for all; another shape of batch is compiled when it comes, with a warning
    that says what changed, and counted in the metric `num_recompilations`. After
    `config.max_shapes` of them further shapes run as `step` does. So pad batches to few lengths.

    With `backend` "eager" or "aot_eager" and `fuse` "none" every bit is the step's. Compile
    `funcrl.donate(step)` to write the new state into the old one's memory, inside the program;
    under a CUDA graph that also saves the copies.

    Args:
        step: from `funcrl.grpo_step`, or `funcrl.donate` of it.
        state: a state of it; only shapes are read.
        batch: a batch; only shapes are read.
        config: `CompileConfig()` when left out.
        graph: what `funcrl.graph.step_graph` returned for the same arguments, perhaps rewritten
            further; traced here when left out.

    Example:
        >>> import torch, funcrl
        >>> model = funcrl.models.Transformer(funcrl.models.shape("micro", vocab_size=7))
        >>> step = funcrl.grpo_step(funcrl.logprob_fn(model))
        >>> state, ones = step.init(funcrl.init_params(model, seed=0)), torch.ones(2, 3)
        >>> batch = funcrl.Batch(ones.long(), ones.long(), ones > 0, -ones, ones, ones)
        >>> fast = funcrl.compile_step(step, state, batch)
        >>> new, metrics = fast(state, batch)
        >>> torch.equal(new.params["norm.weight"], step(state, batch)[0].params["norm.weight"])
        True
    """
    config = CompileConfig() if config is None else config
    _check(state, config)
    start_workers(tree.leaves(state)[0].device, config)
    batch = tree.map(_contiguous, batch)
    pool = torch.cuda.graph_pool_handle() if config.cudagraph == "full" else None
    if graph is None:
        graph = step_graph(step, state, batch, config)
    else:
        _check_graph(graph, state, batch)
    programs = {_shapes(state, batch): _program(graph, config, pool)}

    @checked
    def update(state: TrainState, batch: Rows) -> tuple[TrainState, Metrics]:
        batch = tree.map(_contiguous, batch)
        shapes = _shapes(state, batch)
        run = programs.get(shapes)
        if run is None:
            what = _difference(state, batch, list(programs)[-1])
            if len(programs) == config.max_shapes:
                warnings.warn(
                    f"compile_step runs a step uncompiled: {what}, and {config.max_shapes} shapes "
                    f"are compiled (max_shapes).",
                    stacklevel=4,
                )
                return _counted(step.update(state, batch), len(programs) - 1)
            warnings.warn(f"compile_step compiles again: {what}.", stacklevel=4)
            again = step_graph(step, state, batch, config)
            run = programs[shapes] = _program(again, config, pool)
        return _counted(run(state, batch), len(programs) - 1)

    update.__qualname__ = f"compile_step({step}, {config})"
    return Step(step.init, update)


@checked
def compile_at_first(step: Step, config: CompileConfig) -> Step:
    """Return `compile_step` of the first state and batch that come.

    Args:
        step: from `funcrl.grpo_step`, or `funcrl.donate` of it.
        config: how.

    Example:
        >>> import torch, funcrl
        >>> model = funcrl.models.Transformer(funcrl.models.shape("micro", vocab_size=7))
        >>> step = funcrl.grpo_step(funcrl.logprob_fn(model))
        >>> fast = funcrl.graph.compile_at_first(step, funcrl.CompileConfig())
        >>> state, ones = fast.init(funcrl.init_params(model, seed=0)), torch.ones(2, 3)
        >>> batch = funcrl.Batch(ones.long(), ones.long(), ones > 0, -ones, ones, ones)
        >>> int(fast(state, batch)[1].maxes["num_recompilations"])
        0
    """
    compiled: list[Step] = []

    @checked
    def update(state: TrainState, batch: Rows) -> tuple[TrainState, Metrics]:
        if not compiled:
            compiled.append(compile_step(step, state, batch, config))
        return compiled[0](state, batch)

    return Step(step.init, update)


@checked
@without_collection()
def step_graph(step: Step, state: TrainState, batch: Rows, config: CompileConfig) -> GraphModule:
    """Return the graph that `compile_step` compiles: traced, and rewritten by all passes.

    It is called like `step.update`, and it is what `predict_peak` and a profile read.

    Args:
        step: from `funcrl.grpo_step`, or `funcrl.donate` of it.
        state: a state of it; only shapes are read.
        batch: a batch; only shapes are read.
        config: which passes; what comes after them (backend, CUDA graph) is not read.

    Example:
        >>> import torch, funcrl
        >>> model = funcrl.models.Transformer(funcrl.models.shape("micro", vocab_size=7))
        >>> step = funcrl.grpo_step(funcrl.logprob_fn(model))
        >>> state, ones = step.init(funcrl.init_params(model, seed=0)), torch.ones(2, 3)
        >>> batch = funcrl.Batch(ones.long(), ones.long(), ones > 0, -ones, ones, ones)
        >>> none, full = (
        ...     funcrl.graph.step_graph(step, state, batch, funcrl.CompileConfig(remat=remat))
        ...     for remat in ("none", "full"))
        >>> len(none.graph.nodes) < len(full.graph.nodes)
        True
    """
    graph = trace(step.update, state, tree.map(_contiguous, batch))
    if config.fuse == "per_sample":
        graph = fuse_per_sample(graph)
    if config.remat != "none":
        graph = remat(graph, config.remat, config.remat_budget or None)
    return gather_late(graph)


def _check(state: TrainState, config: CompileConfig) -> None:
    device = tree.leaves(state)[0].device
    if config.cudagraph == "full" and device.type != "cuda":
        raise ValueError(
            f"compile_step expects a state on a CUDA device with cudagraph full, got {device}."
        )


def _check_graph(graph: GraphModule, state: TrainState, batch: Rows) -> None:
    inputs = graph.graph.find_nodes(op="placeholder")
    traced = tree_unflatten([node.meta["val"] for node in inputs], _in_spec(graph))
    if (old := _shapes(*traced)) != _shapes(state, batch):
        raise ValueError(
            f"compile_step expects a graph of this state and batch, got one of others: here "
            f"{_difference(state, batch, old)} in the graph."
        )


def _in_spec(graph: GraphModule) -> Any:
    """Return the structure of a traced step's arguments."""
    (*_, in_spec, _) = graph.graph._codegen.pytree_info  # type: ignore[attr-defined]  # (as trace leaves it)
    return in_spec


@without_collection()
def _program(graph: GraphModule, config: CompileConfig, pool: Any) -> Update:
    """Return the compiled step of a graph's shapes; the first call compiles."""
    written = sorted(written_inputs(graph.graph))
    program = _flat(graph) if config.backend == "eager" else _compiled(graph, config)
    if config.cudagraph == "full":
        program = _captured_at_first(program, written, pool)

    in_spec = _in_spec(graph)

    @torch.no_grad()
    def update(state: TrainState, batch: Rows) -> tuple[TrainState, Metrics]:
        if written:
            check_own_memory(state)
        # By key: a dictionary may be in another order than when it was traced.
        leaves = tree_flatten_spec((state, batch), in_spec)
        result: tuple[TrainState, Metrics] = graph.graph.process_outputs(program(*leaves))
        return result

    return update


def _flat(module: GraphModule) -> GraphModule:
    """Return the graph as a function from leaves to a list of leaves."""
    graph = copied(module.graph)
    graph.set_codegen(CodeGen())
    return as_module(graph, module)


def _compiled(graph: GraphModule, config: CompileConfig) -> Program:
    """Return a traced step in compiled pieces, as a function from leaves to a list of leaves."""
    if config.backend == "inductor":
        graph = embedding_by_kernel(select_for_scatter(graph))
    pieces = split_repeated(graph)
    if config.backend == "inductor" and len(list(pieces.children())) == 1:
        # Layers that are compiled together: what one of them computes again would be merged away.
        pieces = split_repeated(add_fences(graph))
    pieces.graph.set_codegen(CodeGen())
    pieces.recompile()
    for piece in pieces.children():
        assert isinstance(piece, GraphModule)
        computed = [n for n in piece.graph.nodes if n.op == "call_function" and not is_free(n)]
        if all(map(is_uncompiled, computed)):
            continue
        _compile_piece(piece, config.backend)
    if config.cache_dir is None:
        return pieces
    return _cached(pieces, config.cache_dir / f"{_key(pieces)}.bin")


def _compile_piece(piece: GraphModule, backend: str) -> None:
    """Replace a piece's forward by its compiled one."""
    scalars = scalars_as_elements(piece)
    # Of its forward, whose code is its own: `piece.compile` would share one cache among all.
    # torch's own cache does not ask for which vectors a kernel was written: loaded on a processor
    # with narrower ones, it leaves elements unwritten. This option is part of the cache's key.
    bits = _VECTOR_BITS.get(torch.backends.cpu.get_cpu_capability())
    options: dict[str, Any] = {"cpp.simdlen": bits} if bits and backend == "inductor" else {}
    compiled = torch.compile(
        piece.forward, backend=backend, dynamic=False, fullgraph=True, options=options
    )

    def forward(*inputs: Tensor) -> Any:
        leaves = list(inputs)
        for index in scalars:
            leaves[index] = leaves[index].view(1)
        return compiled(*leaves)

    piece.forward = forward


def _key(pieces: GraphModule) -> str:
    """Return a hash of the code, the shapes, the device, its vectors and torch's version."""
    inputs = pieces.graph.find_nodes(op="placeholder")
    values = [(v.shape, v.dtype, v.device) for v in (node.meta["val"] for node in inputs)]
    device = torch.cuda.get_device_name() if values[0][2].type == "cuda" else "cpu"
    code = [str(part.code) for part in pieces.modules()]
    vectors = torch.backends.cpu.get_cpu_capability()
    text = f"{torch.__version__} {device} {vectors} {values} {code}"
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _cached(compiled: Program, path: Path) -> Program:
    """Load the compiler's results from a file, or write them there after the first call."""
    first = [True]

    def program(*leaves: Tensor) -> Any:
        if not first:
            return compiled(*leaves)
        # A file that was damaged, or is another version's, is not understood, and written anew.
        loaded = (
            path.exists() and torch.compiler.load_cache_artifacts(path.read_bytes()) is not None
        )
        result = compiled(*leaves)
        first.clear()
        made = None if loaded else torch.compiler.save_cache_artifacts()
        if made is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            unfinished = path.with_suffix(f".{uuid4().hex}.part")  # of this process alone
            unfinished.write_bytes(made[0])
            unfinished.replace(path)  # whole or not at all
        return result

    return program


def _captured_at_first(program: Program, written: list[int], pool: Any) -> Program:
    """Return a program that captures a CUDA graph at its first call, in that call's memory."""
    captured: list[Program] = []

    def replay(*leaves: Tensor) -> Any:
        if not captured:
            captured.append(capture(program, leaves, written, pool))
        return captured[0](*leaves)

    return replay


def _counted(result: tuple[TrainState, Metrics], count: int) -> tuple[TrainState, Metrics]:
    state, metrics = result
    counted = torch.full((), count, device=state.step.device)
    return state, metrics._replace(maxes={**metrics.maxes, "num_recompilations": counted})


def _shapes(state: TrainState, batch: Rows) -> _Shapes:
    shapes = tuple(
        (tuple(leaf.shape), leaf.dtype, leaf.device, leaf.stride())
        for leaf in tree.leaves((state, batch))
    )
    return tree.structure((state, batch)), shapes


def _contiguous(leaf: Tensor) -> Tensor:
    """Return the leaf contiguous, also in the strides of axes of one element."""
    return leaf.contiguous().view(leaf.shape)


def _difference(state: TrainState, batch: Rows, old: _Shapes) -> str:
    """Return a sentence about the first leaf whose shape, dtype, device or strides differ."""
    (structure, before), (_, shapes) = old, _shapes(state, batch)
    was = dict(zip(_names(structure.unflatten(range(len(before)))), before, strict=True))
    now = dict(zip(_names((state, batch)), shapes, strict=True))
    for path in {**now, **was}:
        if path not in was:
            return f"there is {path}, which was not there"
        if path not in now:
            return f"there is no {path}, which was there"
        if now[path] != was[path]:
            return f"{path} has shape, dtype, device and strides {now[path]}, and had {was[path]}"
    return "a tuple or a dictionary of the state or the batch has another type"


def _names(both: tuple[Any, Any]) -> list[str]:
    """Return the paths in a state and a batch, in the order of their leaves."""
    return [f"{('state', 'batch')[int(path[0])]}{path[1:]}" for path in tree.paths(both)]
