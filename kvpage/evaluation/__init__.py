"""Evaluation: what a budget costs a model, in fidelity, memory of what was evicted, and tasks."""

from kvpage.evaluation.contenders import FULL, Contender
from kvpage.evaluation.evaluating import Evaluation, evaluate
from kvpage.evaluation.fidelity import Fidelity, fidelity, pooled
from kvpage.evaluation.intervals import bootstrap_interval, pass_at_k, wilson_interval
from kvpage.evaluation.memory import MemoryStudy
from kvpage.evaluation.runner import Subject, run
from kvpage.evaluation.tasks import TaskStudy, load_problems
from kvpage.evaluation.texts import FidelityStudy

__all__ = [
    "FULL",
    "Contender",
    "Evaluation",
    "Fidelity",
    "FidelityStudy",
    "MemoryStudy",
    "Subject",
    "TaskStudy",
    "bootstrap_interval",
    "evaluate",
    "fidelity",
    "load_problems",
    "pass_at_k",
    "pooled",
    "run",
    "wilson_interval",
]
