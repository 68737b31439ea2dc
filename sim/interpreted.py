"""An engine's own text, run by Python: for policies and models that are not compiled."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

from metasd_bandits.compiled.specialise import unbound
from metasd_bandits.policy import Policy

__all__ = ["interpret"]


def interpret(
    template: ModuleType, policy: Policy | None, kernels: dict[str, Callable[..., Any]]
) -> ModuleType:
    """`template` as plain Python, with the policy's methods in the places of its kernels."""
    text = unbound(inspect.getsource(template))
    for name in ("kernel", "lean"):
        text = text.replace(f"from metasd_bandits.compiled.{name} import {name}", "")
    module = ModuleType(f"{template.__name__}_interpreted")
    module.__dict__.update(
        kernel=lambda function: function,
        lean=lambda **options: lambda function: function,
        select=lambda s, stream: s.select(),
        update=lambda s, arm, reward, cost, propensity: s.update(arm, reward, cost=cost),
        **{name: getattr(kernel, "py_func", kernel) for name, kernel in kernels.items()},
    )
    exec(compile(text, module.__name__, "exec"), module.__dict__)
    for name, value in list(vars(module).items()):
        setattr(module, name, getattr(value, "py_func", value))
    module.__dict__["view"] = lambda buffer: policy
    return module
