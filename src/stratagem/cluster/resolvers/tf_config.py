"""Finds the cluster in `TF_CONFIG`, as TensorFlow's programs, Kubeflow and `stratagem run` write it."""

from typing import Any, final

from stratagem import _env
from stratagem.cluster import strict_json
from stratagem.cluster.resolvers.resolver import Resolver, require_own_protocol
from stratagem.cluster.spec import ClusterSpec
from stratagem.errors import ClusterSpecError

_EXAMPLE = '"task": {"type": "worker", "index": 0}'


@final
class TFConfigResolver(Resolver):
    """The cluster that `TF_CONFIG` describes. If it is not set or has no cluster in it, the program runs alone.

    Args:
        text: The description; by default the value of `TF_CONFIG` in the environment.
        task_type: The job of this task, instead of the one in the description.
        task_id: Its index, instead of the one in the description.
        rpc_layer: Has no meaning here; TensorFlow's defaults are taken.
        environment: Likewise.

    Raises:
        ClusterSpecError: It is not JSON, or it does not describe a cluster.

    Example:
        >>> text = '{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 1}}'
        >>> TFConfigResolver(text).describe()
        'TF_CONFIG: a cluster of 2 worker, this is worker/1; the first task is worker/0 (a:1)'
    """

    def __init__(
        self,
        text: str | None = None,
        *,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
        environment: str | None = None,
    ) -> None:
        require_own_protocol(rpc_layer, environment)
        config = _read(_env.tf_config() if text is None else text)
        spec = _cluster_of(config)
        if task_type is None and task_id is None:
            task_type, task_id = _task_of(config, spec)
        super().__init__(_env.TF_CONFIG, spec, task_type, task_id)


def _read(text: str | None) -> dict[str, Any]:
    if text is None or not text.strip():
        return {}
    try:
        config = strict_json.read(text)
    except strict_json.NotJsonError as error:
        raise ClusterSpecError(f"{_env.TF_CONFIG} is not valid JSON: {error}") from None
    if not isinstance(config, dict):
        raise ClusterSpecError(f'{_env.TF_CONFIG} is an object with "cluster" and "task", got {config!r}')
    return config


def _cluster_of(config: dict[str, Any]) -> ClusterSpec:
    try:
        return ClusterSpec(config.get("cluster") or {})
    except ClusterSpecError as error:
        raise ClusterSpecError(f"{_env.TF_CONFIG}: {error}") from None


def _task_of(config: dict[str, Any], spec: ClusterSpec) -> tuple[str | None, int | None]:
    if not spec:
        return None, None
    task = config.get("task")
    names = ", ".join(each.name for each in spec.tasks)
    if task is None:
        raise ClusterSpecError(f"{_env.TF_CONFIG} has no task; add {_EXAMPLE} with one of {names}")
    if not isinstance(task, dict) or not {"type", "index"} <= task.keys():
        raise ClusterSpecError(f"{_env.TF_CONFIG}: a task looks like {_EXAMPLE}, got {task!r}")
    index = task["index"]
    if type(index) is not int:
        raise ClusterSpecError(
            f"{_env.TF_CONFIG}: the index of a task is a whole number, got {index!r}; cluster has {names}"
        )
    return str(task["type"]), index
