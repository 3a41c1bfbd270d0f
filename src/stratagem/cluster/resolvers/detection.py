"""Finds out which starter has started this process, if any, and says where it looked."""

import dataclasses
from collections.abc import Callable
from typing import final

from stratagem import _env
from stratagem.cluster.resolvers.kubernetes import KubernetesResolver
from stratagem.cluster.resolvers.resolver import Resolver
from stratagem.cluster.resolvers.slurm import SlurmResolver
from stratagem.cluster.resolvers.tf_config import TFConfigResolver
from stratagem.cluster.resolvers.torchrun import TorchrunResolver


@final
@dataclasses.dataclass(frozen=True)
class Found:
    """Which cluster the environment describes, and why.

    Args:
        resolver: The resolver that describes it; None if the program runs alone.
        looked_at: The places that were searched, in order, and what was found in each.
    """

    resolver: Resolver | None
    looked_at: tuple[str, ...]

    def explain(self) -> str:
        """Returns one line for each place that was searched; the last line has the outcome."""
        outcome = "no cluster: the program runs alone" if self.resolver is None else self.resolver.describe()
        return "\n".join([*self.looked_at, outcome])


def found() -> Found:
    """Looks for `TF_CONFIG` and for the variables of torchrun, Slurm and Kubernetes; takes the first that is set.

    Raises:
        ClusterSpecError: The description is not that of a cluster.
        EnvironmentVariableError: A variable is missing or wrong.
    """
    looked_at: list[str] = []
    for name, reason_against, resolver in _PLACES:
        reason = reason_against()
        if reason is None:
            looked_at.append(f"{name}: found")
            return Found(resolver(), tuple(looked_at))
        looked_at.append(f"{name}: {reason}")
    return Found(None, tuple(looked_at))


def _why_not_tf_config() -> str | None:
    if not (_env.tf_config() or "").strip():
        return "not set"
    return None if TFConfigResolver().cluster_spec() else "set, but names no cluster"


def _why_not_torchrun() -> str | None:
    variables = _env.torchrun()
    # A job's own variables may be among them; all four together are torchrun's.
    missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in variables]
    return f"{', '.join(missing)} not set" if missing else None


def _why_not_slurm() -> str | None:
    variables = _env.slurm()
    if "SLURM_JOB_ID" not in variables:
        return "SLURM_JOB_ID not set"
    if "SLURM_STEP_NODELIST" not in variables:
        return "inside a job, but not started by srun (SLURM_STEP_NODELIST not set)"
    return None


def _why_not_kubernetes() -> str | None:
    if "KUBERNETES_SERVICE_HOST" not in _env.kubernetes():
        return "KUBERNETES_SERVICE_HOST not set"
    return None if _env.num_tasks() else f"in a pod, but {_env.NUM_TASKS} is not set"


_PLACES: tuple[tuple[str, Callable[[], str | None], Callable[[], Resolver]], ...] = (
    (_env.TF_CONFIG, _why_not_tf_config, TFConfigResolver),
    ("torchrun's variables", _why_not_torchrun, TorchrunResolver),
    ("Slurm's variables", _why_not_slurm, SlurmResolver),
    ("Kubernetes' variables", _why_not_kubernetes, KubernetesResolver),
)
