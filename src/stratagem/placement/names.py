"""Names operations as TensorFlow does: `torch.matmul` is a `MatMul`, the second one `MatMul_1`.

Both the eager log and graphs take their names from here.
"""

from collections.abc import Callable
from typing import Any, final

# Where TensorFlow's word is not torch's with capital letters.
_TYPES = {
    "matmul": "MatMul",
    "mm": "MatMul",
    "__matmul__": "MatMul",
    "__rmatmul__": "MatMul",
    "bmm": "BatchMatMul",
    "addmm": "AddMM",
    "linear": "Linear",
    "tensor": "Const",
    "as_tensor": "Const",
    "from_numpy": "Const",
    "scalar_tensor": "Const",
    "full": "Fill",
    "arange": "Range",
    "rand": "RandomUniform",
    "randn": "RandomStandardNormal",
    "uniform_": "RandomUniform",
    "normal_": "RandomStandardNormal",
    "randint": "RandomUniformInt",
    "conv1d": "Conv1D",
    "conv2d": "Conv2D",
    "conv3d": "Conv3D",
    "max_pool2d": "MaxPool",
    "avg_pool2d": "AvgPool",
    "add": "Add",
    "__radd__": "Add",
    "subtract": "Sub",
    "rsub": "Sub",
    "__rsub__": "Sub",
    "multiply": "Mul",
    "__rmul__": "Mul",
    "div": "RealDiv",
    "divide": "RealDiv",
    "true_divide": "RealDiv",
    "__truediv__": "RealDiv",
    "__rtruediv__": "RealDiv",
    "pow": "Pow",
    "__rpow__": "Pow",
    "cat": "ConcatV2",
    "concat": "ConcatV2",
    "stack": "Pack",
    "unbind": "Unpack",
    "__getitem__": "StridedSlice",
    "__setitem__": "StridedSliceAssign",
    "view": "Reshape",
    "reshape": "Reshape",
    "clone": "Identity",
    "to": "Cast",
    "where": "Select",
    "eq": "Equal",
    "ne": "NotEqual",
    "lt": "Less",
    "le": "LessEqual",
    "gt": "Greater",
    "ge": "GreaterEqual",
    "argmax": "ArgMax",
    "argmin": "ArgMin",
    "relu": "Relu",
    "gelu": "Gelu",
    "elu": "Elu",
    "softmax": "Softmax",
    "cross_entropy": "SoftmaxCrossEntropy",
    "batch_norm": "FusedBatchNorm",
    "add_n": "AddN",
}


def type_of(function: Callable[..., Any] | str) -> str:
    """The type of an operation, from torch's function or its name.

    Example:
        >>> type_of("matmul"), type_of("log_softmax"), type_of("__add__"), type_of("add_")
        ('MatMul', 'LogSoftmax', 'Add', 'AssignAdd')
    """
    word = function if isinstance(function, str) else getattr(function, "__name__", type(function).__name__)
    if word in _TYPES:
        return _TYPES[word]
    if word.startswith("__") and word.endswith("__"):
        inner = word.strip("_")
        in_place = len(inner) > 2 and inner[0] == "i" and inner[1:] in _PLAIN_OPERATORS
        return type_of(inner[1:] + "_") if in_place else type_of(inner)
    plain = word.strip("_")
    if word.endswith("_") and plain:
        return f"Assign{type_of(plain)}"
    return _TYPES.get(plain) or "".join(part[:1].upper() + part[1:] for part in plain.split("_"))


_PLAIN_OPERATORS = {"add", "sub", "mul", "truediv", "floordiv", "pow", "mod", "and", "or", "xor", "matmul"}


@final
class NameCounter:
    """Makes names that are used once: `MatMul`, `MatMul_1`, `MatMul_2`."""

    def __init__(self) -> None:
        self._used: dict[str, int] = {}

    def unique(self, wanted: str) -> str:
        """The wanted name, numbered if it was given before."""
        number = self._used.get(wanted)
        if number is None:
            self._used[wanted] = 1
            return wanted
        while (name := f"{wanted}_{number}") in self._used:
            number += 1
        self._used[wanted] = number + 1
        self._used[name] = 1
        return name
