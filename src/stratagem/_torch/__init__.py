"""Everything private of torch that stratagem relies on, under names of its own.

Torch may change these without notice; with a new torch this is the folder to look through, with `_tree` for nestings.
What is here has been so since torch 2.2, unless it says otherwise. Aliases and `attrgetter`s cost no call of Python
where they are used for every tensor. The overrides of torch's symbolic shapes stay with their class, in
`graphs/symbolic_sizes.py`, and names of operations (`aten._to_copy`) are no private names.
"""

from stratagem._torch import (
    backward_passes,
    collective_groups,
    compiling,
    gradient_hooks,
    kernel_choice,
    loading_parts,
    modes,
    module_parts,
    operations,
    optimizer_parts,
    private_slot,
    storages,
    tensors,
    without_values,
)

__all__ = [
    "backward_passes",
    "collective_groups",
    "compiling",
    "gradient_hooks",
    "kernel_choice",
    "loading_parts",
    "modes",
    "module_parts",
    "operations",
    "optimizer_parts",
    "private_slot",
    "storages",
    "tensors",
    "without_values",
]
