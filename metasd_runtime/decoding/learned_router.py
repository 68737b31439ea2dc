"""The learned router, a baseline: a classifier picks one drafter from the prompt, once.

The classifier is anything that maps a text to a drafter's name: a scikit-learn pipeline (trained
here, from prompts whose best drafter is known or from recorded traces), or any Hugging Face
sequence classifier whose labels are drafter names (the paper routes by BERT).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from metasd_bandits import Policy, Trace, checks
from metasd_runtime.decoding.prompt_policy import PromptPolicy

if TYPE_CHECKING:
    from sklearn.pipeline import Pipeline
    from transformers import PreTrainedTokenizerBase

__all__ = ["LearnedRouter", "best_arms", "load_classifier", "policy_by_name", "train_router"]

Classifier = Callable[[str], str]


class LearnedRouter(PromptPolicy):
    """Use the drafter that a classifier names for the prompt.

    Parameters
    ----------
    classifier : callable, scikit-learn estimator, or path-like
        A function from text to a drafter's name; an estimator with ``predict``; a ``.joblib`` file
        as `train_router` makes it, or the id or folder of a Hugging Face sequence classifier.
        (A joblib file is code: load only your own.)
    tokenizer : PreTrainedTokenizerBase
        The target's, to read the prompt.

    Raises
    ------
    ConfigError
        At the query's start, if the classifier names a drafter that is not in the pool.
    """

    name = "learned-router"

    def __init__(self, classifier: Any, tokenizer: PreTrainedTokenizerBase) -> None:
        self.classify = load_classifier(classifier)
        self.tokenizer = tokenizer
        self.reset(1)

    def reset(self, n_arms: int, seed: int | None = None) -> None:
        self._n_arms, self._arm = n_arms, 0

    def forget(self, keep: float, seed: int | None = None) -> None:
        """Nothing is learned while decoding, so nothing is forgotten."""

    def read(self, tokens: Sequence[int], arms: Sequence[str]) -> None:
        text = str(self.tokenizer.decode(list(tokens), skip_special_tokens=True))
        name = self.classify(text)
        self._arm = list(arms).index(checks.choice("drafter named by the router", name, arms))

    def select(self, available: Sequence[bool] | NDArray[np.bool_] | None = None) -> int:
        return int(np.argmax(self.probabilities(available)))

    def update(self, arm: int, reward: float, **round_: Any) -> None:
        if not 0.0 <= reward <= 1.0:
            raise ValueError(f"reward={reward!r} is outside [0, 1]")

    def probabilities(
        self, available: Sequence[bool] | NDArray[np.bool_] | None = None
    ) -> NDArray[np.float64]:
        """All on the named arm; on the first available one where that broke."""
        usable = np.ones(self._n_arms, bool) if available is None else np.asarray(available, bool)
        if not usable.any():
            raise ValueError("no arm is available")
        arm = self._arm if usable[self._arm] else int(np.argmax(usable))
        return np.eye(self._n_arms)[arm]


def policy_by_name(policy: str | Policy, tokenizer: PreTrainedTokenizerBase | None) -> str | Policy:
    """``learned-router:PATH`` as the policy it means; anything else as it is.

    Raises
    ------
    ConfigError
        If there is no path, or no tokenizer to read prompts with.
    """
    kind, _, path = policy.partition(":") if isinstance(policy, str) else ("", "", "")
    if kind != LearnedRouter.name:
        return policy
    if not path or tokenizer is None:
        missing = "the target's tokenizer" if path else f"a path: {kind}:router.joblib"
        raise checks.ConfigError(f"policy {policy!r} needs {missing}")
    return LearnedRouter(path, tokenizer)


def load_classifier(classifier: Any) -> Classifier:
    """A function from text to a drafter's name, out of whatever `LearnedRouter` takes.

    Raises
    ------
    ConfigError
        If it is none of these.
    """
    if isinstance(classifier, str | Path):
        path = Path(classifier)
        if path.suffix != ".joblib":
            return _sequence_classifier(str(classifier))
        import joblib

        if not path.exists():
            raise checks.ConfigError(f"{path} does not exist; make it with metasd train-router")
        classifier = joblib.load(path)
    if hasattr(classifier, "predict"):
        return lambda text: str(classifier.predict([text])[0])
    if callable(classifier):
        return classifier
    raise checks.ConfigError(
        f"{classifier!r} classifies no text; give a function, an estimator, or a path"
    )


def _sequence_classifier(name: str) -> Classifier:
    """A Hugging Face sequence classifier by id or folder."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model = AutoModelForSequenceClassification.from_pretrained(name).eval()
    tokenizer = AutoTokenizer.from_pretrained(name)

    @torch.inference_mode()
    def classify(text: str) -> str:
        inputs = tokenizer(text, return_tensors="pt", truncation=True)
        inputs.pop("token_type_ids", None)
        return str(model.config.id2label[int(model(**inputs).logits.argmax())])

    return classify


def train_router(prompts: Sequence[str], drafters: Sequence[str], seed: int = 0) -> Pipeline:
    """Train a classifier from prompts and the drafter that serves each best.

    Words and pairs of words, weighted by their rarity, and a logistic regression: it needs no
    model, and learns from tens of prompts what a task looks like.

    Parameters
    ----------
    prompts, drafters : sequences of str, of one length
        At least two different drafters.
    seed : int

    Raises
    ------
    ConfigError
        If there is nothing to tell apart.
    """
    try:
        from sklearn.feature_extraction.text import TfidfVectorizer
        from sklearn.linear_model import LogisticRegression
        from sklearn.pipeline import make_pipeline
    except ImportError:
        raise checks.ConfigError(
            "training a router needs scikit-learn; install it with: pip install 'metasd[router]'"
        ) from None

    if len(prompts) != len(drafters):
        raise checks.ConfigError(f"{len(prompts)} prompts but {len(drafters)} drafters were given")
    if len(set(drafters)) < 2:
        raise checks.ConfigError(
            f"all {len(prompts)} prompts are best served by {set(drafters) or 'nothing'}; "
            "a router needs at least two drafters to tell apart"
        )
    words = TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True, token_pattern=r"\w+|[^\w\s]")
    return make_pipeline(words, LogisticRegression(max_iter=1000, random_state=seed)).fit(
        list(prompts), list(drafters)
    )


def best_arms(traces: Sequence[Trace]) -> dict[str, str]:
    """The drafter of the largest mean reward for each query of recorded traces.

    Full-information rounds (``shadow``) tell every arm's reward; of others the same queries must
    have been recorded with several drafters. Queries that only one arm served are left out.
    """
    rewards: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for trace in traces:
        arms = trace.header.arms
        for round_ in trace:
            every = round_.rewards
            if every is None:
                rewards[round_.query][arms[round_.arm]].append(round_.reward)
                continue
            for arm, reward in zip(arms, every, strict=True):
                if not math.isnan(reward):
                    rewards[round_.query][arm].append(reward)
    return {query: _best(arms) for query, arms in rewards.items() if len(arms) > 1}


def _best(arms: Mapping[str, Sequence[float]]) -> str:
    return max(arms, key=lambda arm: float(np.mean(arms[arm])))
