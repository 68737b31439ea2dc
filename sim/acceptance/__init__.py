"""Acceptance models: how many drafts a target accepts; one file per law."""

from sim.acceptance.base import AcceptanceModel, Place
from sim.acceptance.clustered import Clustered
from sim.acceptance.iid import IID
from sim.acceptance.language import Language
from sim.acceptance.recorded import Recorded
from sim.acceptance.registry import make_acceptance, register_acceptance

__all__ = [
    "IID",
    "AcceptanceModel",
    "Clustered",
    "Language",
    "Place",
    "Recorded",
    "make_acceptance",
    "register_acceptance",
]
