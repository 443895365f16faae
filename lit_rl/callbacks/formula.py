"""The algorithm of a run as formulas with its numbers, read from the docstrings of its choices."""

import re
import sys
from dataclasses import fields, is_dataclass
from types import FunctionType
from typing import Any

from lit_rl.algorithms import TRPO, ActorCritic, PenalizedTRPO


def formula(choice: Any) -> str:
    """Return the equation of a choice with its settings as numbers, such as of a policy loss.

    The equation is the first paragraph of the docstring of the function that the docstring of the
    class names in its first line, or else that line itself. Settings that it does not name follow
    in brackets; a name before a bracket is a function. What has no docstring is shown as it
    represents itself.

    Args:
        choice: an advantage estimator, a loss, an aggregation, a shaping or a correction; usually a
            frozen dataclass.

    Example:
        >>> from lit_rl.policy_losses import ClippedSurrogate
        >>> formula(ClippedSurrogate(clip_low=0.2, clip_high=0.28))
        'clipped_surrogate = -min(ratio * A, clip(ratio, 1 - 0.2, 1 + 0.28) * A)'
    """
    kind = type(choice)
    if not is_dataclass(choice) or kind.__doc__ is None:
        return repr(choice) if is_dataclass(choice) else kind.__name__
    text, rest = _equation(kind), []
    for field in fields(choice):
        value = getattr(choice, field.name)
        shown = formula(value) if is_dataclass(value) else _number(value)
        inserted = re.sub(rf"\b{field.name}\b(?!\()", shown.replace("\\", r"\\"), text)
        if inserted == text and value is not None:
            rest.append(f"{field.name} = {shown}")
        text = inserted
    return text + (f" ({', '.join(rest)})" if rest else "")


def _equation(kind: type) -> str:
    summary = _first_paragraph(kind.__doc__)
    names = re.findall(r"`(\w+)`", summary)
    of_module = vars(sys.modules[kind.__module__])
    functions = [of_module[name] for name in names if isinstance(of_module.get(name), FunctionType)]
    return _first_paragraph(functions[0].__doc__) if functions else summary


def _first_paragraph(docstring: str | None) -> str:
    return " ".join((docstring or "").partition("\n\n")[0].split()).removesuffix(".")


def _number(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def algorithm_formulas(module: Any, kl_coef: float) -> dict[str, str]:
    """Return what an algorithm optimizes, line by line.

    Args:
        module: a `PolicyGradient`.
        kl_coef: the weight of the KL in the first iteration, which a controller may have set.
    """
    lines = {
        "reward": _reward(module, kl_coef),
        "advantage A": formula(module.advantage),
        "loss per token": _loss(module, kl_coef),
        "aggregation": formula(module.aggregation),
        "ratio": f"exp(log_probs - old_log_probs), {type(module.old_log_probs).__name__}",
    }
    if isinstance(module, ActorCritic):
        loss = f"{module.value_coef:g} * {formula(module.value_loss)}"
        lines["critic"] = f"{type(module.critic_source).__name__}, {loss}"
    if module.sampler_correction is not None:
        lines["sampler weight"] = formula(module.sampler_correction)
    if isinstance(module, TRPO):
        lines["trust region"] = f"mean KL(old || new) <= {module.max_kl:g} nats per token"
    return lines


def _loss(module: Any, kl_coef: float) -> str:
    terms = [formula(module.policy_loss)]
    if kl_coef > 0 and not module.kl.in_reward:
        terms.append(f"+ {kl_coef:g} * {module.kl.estimator}(policy, reference)")
    if isinstance(module, PenalizedTRPO):
        terms.append(f"+ {module.beta:g} * k3(old, new)")
    if module.entropy_coef:
        terms.append(f"- {module.entropy_coef:g} * entropy")
    return " ".join(terms)


def _reward(module: Any, kl_coef: float) -> str:
    parts = [type(module.reward).__name__, *(formula(s) for s in module.reward_shaping)]
    if kl_coef > 0 and module.kl.in_reward:
        parts.append(f"less {kl_coef:g} * {module.kl.estimator}(policy, reference) per token")
    return ", ".join(parts)
