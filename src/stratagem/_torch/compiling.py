"""What torch.compile makes, and how it is kept out of the library."""

import functools
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import Any, Final

import torch
from torch._guards import CompileContext

from stratagem.errors import StrategyError


def is_compiled(value: object) -> bool:
    """Whether it is a function that `torch.compile` made; a compiled module is none."""
    own = vars(value) if isinstance(value, FunctionType) else {}
    return "_torchdynamo_orig_callable" in own and not own.get("_torchdynamo_disable", False)


def is_compiled_module(value: object) -> bool:
    """Whether it is what `torch.compile` made of a module; one that `module.compile()` has changed is none."""
    return type(value).__module__ == _COMPILER_MODULE and type(value).__name__ == "OptimizedModule"


def uncompiled(value: Any) -> Any:
    """What a compiled function or module was made of."""
    if is_compiled_module(value):
        return value._orig_mod
    plain = value._torchdynamo_orig_callable
    # Around what is torch's, or has no frame of Python's, torch puts a function of its own.
    around = importlib.import_module("torch._dynamo.external_utils").__file__
    while getattr(getattr(plain, "__code__", None), "co_filename", None) == around:
        plain = plain.__wrapped__
    return plain


def reduce_compiled(value: Any) -> Any:
    """How compiled functions and modules travel: as what they were made of; they are compiled where they arrive."""
    if is_compiled(value):
        refuse_compiled_step(value)
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        compiler = next(each for each in cells if type(each).__module__ == _COMPILER_MODULE)
        return _compiled_by, (compiler, uncompiled(value))
    if is_compiled_module(value):
        return _compiled_by, (value.dynamo_ctx, value._orig_mod)
    if type(value).__module__ == _COMPILER_MODULE and hasattr(value, "_dynamic"):
        # Torch's own way leaves `fullgraph`, `dynamic` and the limit of recompilations out.
        frames = value.callback._torchdynamo_orig_backend
        options = {
            "nopython": value.fullgraph,
            "dynamic": value._dynamic,
            "guard_filter_fn": getattr(value._hooks, "guard_filter_fn", None),
            "recompile_limit": getattr(frames, "_recompile_limit", None),
        }
        given = {key: option for key, option in options.items() if option is not None}
        return _compiler, (_innermost_backend(frames), given, _compiler_settings())
    return NotImplemented


def _innermost_backend(frames: Any) -> Any:
    while hasattr(frames, "_torchdynamo_orig_backend"):
        frames = frames._torchdynamo_orig_backend
    return frames


def _compiled_by(compiler: Any, plain: Any) -> Any:
    return compiler(plain)


def _compiler(backend: Any, options: dict[str, Any], settings: dict[str, dict[str, Any]]) -> Any:
    for name, values in settings.items():
        module = importlib.import_module(name)
        for key, value in values.items():
            setattr(module, key, value)
    made: Any = importlib.import_module("torch._dynamo").optimize(backend, **options)
    keep_out_of_compiled_code()
    return made


def _compiler_settings() -> dict[str, dict[str, Any]]:
    """What the program has set of torch's compiler: limits, fallbacks, the random numbers of compiled code."""
    loaded = {name: sys.modules[name] for name in _SETTINGS_OF_COMPILER if name in sys.modules}
    changed = {name: module._get_dict(skip_default=True) for name, module in loaded.items()}
    return {
        name: {key: value for key, value in values.items() if isinstance(value, bool | int | float | str)}
        for name, values in changed.items()
        if values
    }


def is_in_compiler() -> bool:
    """Whether this thread is in torch's compiler, which makes modules of its own."""
    return CompileContext.try_get() is not None


def keep_out_of_compiled_code() -> None:
    """Lets torch's compiler stop where a step comes to the library, which then runs as it does otherwise."""
    rules: Any = sys.modules.get("torch._dynamo.trace_rules")
    if rules is not None and _OWN_FOLDER not in rules.SKIP_DIRS:
        rules.SKIP_DIRS.append(_OWN_FOLDER)
        rules._recompile_re()


def not_compiled(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls a function of the library, and all that it calls, outside the compiled code that may have come to it."""
    compiler: Any = sys.modules.get(_COMPILER_MODULE)
    if compiler is None:
        return function(*args, **kwargs)
    before = compiler.set_eval_frame(None)
    try:
        return function(*args, **kwargs)
    finally:
        compiler.set_eval_frame(before)


_COMPILER_MODULE: Final = "torch._dynamo.eval_frame"

_SETTINGS_OF_COMPILER: Final = ("torch._dynamo.config", "torch._functorch.config", "torch._inductor.config")

_OWN_FOLDER: Final = f"{Path(__file__).parents[1]}/"

_COMPILER: Final = "torch._dynamo"

_WITHOUT_COMPILER: Final = "__dynamo_disable"  # where torch keeps what it has made of a function

_COMPILED_NEVER: Final = ("add_param_group", "zero_grad", "state_dict", "load_state_dict")


def spare_compiler() -> None:
    """Lets optimizers be made and used without torch's compiler, as long as nothing else has loaded it.

    Torch loads it, 800 modules in 0.7 s, to say that it shall leave some methods of optimizers alone. While it is not
    loaded, nothing is compiled, and they can be called as they are.
    """
    for name in _COMPILED_NEVER:
        wrapped = getattr(torch.optim.Optimizer, name)
        bare = getattr(wrapped, "__wrapped__", None)
        if bare is not None and not hasattr(bare, _WITHOUT_COMPILER):
            setattr(bare, _WITHOUT_COMPILER, functools.partial(_call_bare, wrapped, bare))


def _call_bare(wrapped: Callable[..., Any], bare: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if _COMPILER not in sys.modules:
        return bare(*args, **kwargs)
    vars(bare).pop(_WITHOUT_COMPILER, None)  # torch makes its own now
    return wrapped(*args, **kwargs)


def refuse_compiled_step(function: Any) -> None:
    """Refuses a compiled `step` of an optimizer, also of one that the library or a scheduler has put there.

    Raises:
        StrategyError: It is one.
    """
    if not is_compiled(function):
        return
    plain = uncompiled(function)
    if isinstance(getattr(plain, "__self__", None), torch.optim.Optimizer) or hasattr(plain, "_wrapped_by_lr_sched"):
        raise StrategyError(
            "a replica calls optimizer.step() as it is, because replicas share an update or give it to others; got one "
            "that torch.compile made. Leave torch.compile out there: fused=True of the optimizer makes one kernel of "
            "its update, and the model or the whole step may be compiled"
        )


def set_compiling(flag: bool) -> bool:
    """Sets what `torch.compiler.is_compiling()` says, and returns what it said."""
    before: bool = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = flag
    return before
