"""The names that a template's text needs before `specialise` binds a policy's kernels."""

from metasd_bandits.compiled.kernel import kernel

__all__ = ["probabilities", "propensity", "select", "update", "update_all"]


@kernel
def select(s, stream):
    return 0


@kernel
def propensity(s, arm):
    return 1.0


@kernel
def probabilities(s):
    s.probabilities[:] = 0.0


@kernel
def update(s, arm, reward, cost, propensity):
    pass


@kernel
def update_all(s, arm, rewards, cost, propensity):
    pass
