"""Hooks of parameters: the program's, and those of the library."""

import operator
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import torch

from stratagem.errors import StrategyError

hooks_of: Final[Callable[[Any], Any]] = operator.attrgetter("_backward_hooks", "_post_accumulate_grad_hooks")
"""The hooks of `register_hook` and of `register_post_accumulate_grad_hook` on a tensor; `None` or empty without any."""


class LibraryHook(NamedTuple):
    """A hook of stratagem's own on a parameter: it stays where the program's are taken off."""

    function: Callable[[torch.Tensor], None]

    def __call__(self, parameter: torch.Tensor) -> None:
        self.function(parameter)


class TensorHooks(NamedTuple):
    """The program's hooks of one parameter, in the dicts that torch calls them from."""

    before: list[tuple[dict[int, Any], int, Any]]
    after: list[tuple[dict[int, Any], int, Any]]

    def put_back(self) -> None:
        """Lets torch call them again."""
        for own, number, hook in (*self.before, *self.after):
            own[number] = hook

    def call(self, gradient: torch.Tensor) -> torch.Tensor:
        """The gradient that `register_hook`'s make of another."""
        for _, _, hook in self.before:
            made = hook(gradient)
            gradient = gradient if made is None else made
        return gradient

    def call_after(self, parameter: torch.Tensor) -> None:
        """Calls those that wait for the gradient to be accumulated."""
        for _, _, hook in self.after:
            hook(parameter)


def program_hooks(tensor: torch.Tensor) -> tuple[list[Any], list[Any]] | None:
    """The hooks that the program has put on a tensor, of both kinds; `None` if there are none."""
    before, after = hooks_of(tensor)
    if not before and not after:
        return None
    found = tuple([hook for hook in (own or {}).values() if type(hook) is not LibraryHook] for own in (before, after))
    return found if any(found) else None  # type: ignore[return-value]


def set_program_hooks(tensor: torch.Tensor, hooks: tuple[list[Any], list[Any]] | None) -> None:
    """Puts such hooks in the place of those that a tensor has."""
    take_hooks(tensor)
    before, after = hooks or ((), ())
    for hook in before:
        tensor.register_hook(hook)  # type: ignore[no-untyped-call]
    for hook in after:
        tensor.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]


def drop_hooks(tensor: Any) -> None:
    """Takes all hooks off a tensor, and what torch keeps for more."""
    tensor._backward_hooks = None
    tensor._post_accumulate_grad_hooks = None


def take_hooks(parameter: torch.Tensor) -> TensorHooks | None:
    """Takes the program's hooks off a parameter; `None` if it has none."""
    before, after = hooks_of(parameter)
    if not before and not after:
        return None
    taken = TensorHooks([], [])
    for own, found in ((before, taken.before), (after, taken.after)):
        for number, hook in list((own or {}).items()):
            if getattr(hook, "__qualname__", "").startswith("register_multi_grad_hook."):
                raise StrategyError(
                    "register_multi_grad_hook waits for gradients inside a backward pass, and those of the global "
                    "batch are there after it; register a hook on each parameter, or look at .grad after backward()"
                )
            if type(hook) is not LibraryHook:
                found.append((own, number, hook))
                del own[number]
    return taken if taken.before or taken.after else None
