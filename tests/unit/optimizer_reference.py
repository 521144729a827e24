"""The optimizers' formulas once more, from the papers' and MXNet's text: float64, one element after the other.

Each function updates the lists in place. `h` holds the hyperparameters; `s` is the state, a dict of lists.
"""

from __future__ import annotations

import math
from typing import Any


def clip(x: float, bound: float | None) -> float:
    return x if bound is None or bound <= 0 else max(-bound, min(bound, x))


def sign(x: float) -> float:
    return (x > 0) - (x < 0)


def zeros(s: dict[str, Any], n: int, *names: str) -> None:
    for name in names:
        s.setdefault(name, [0.0] * n)


def test(w, g, s, t, h):
    for i in range(len(w)):
        w[i] += h["rescale_grad"] * g[i]


def sgd(w, g, s, t, h, mu=None):
    mu = h["momentum"] if mu is None else mu
    zeros(s, len(w), "m")
    for i in range(len(w)):
        rescaled = h["lr"] * (clip(h["rescale_grad"] * g[i], h["clip_gradient"]) + h["wd"] * w[i])
        s["m"][i] = mu * s["m"][i] + rescaled
        w[i] -= s["m"][i]


def nag(w, g, s, t, h):
    zeros(s, len(w), "m")
    for i in range(len(w)):
        full = clip(h["rescale_grad"] * g[i], h["clip_gradient"]) + h["wd"] * w[i]
        # The documented form, with the state free of the rate; equal to the kernel's while the rate stays the same.
        s["m"][i] = h["momentum"] * s["m"][i] + full
        w[i] -= h["lr"] * (full + h["momentum"] * s["m"][i])


def signum(w, g, s, t, h):
    zeros(s, len(w), "m")
    mu = h["momentum"]
    for i in range(len(w)):
        if mu == 0:
            w[i] = (1 - h["lr"] * (h["wd"] + h["wd_lh"])) * w[i] - h["lr"] * sign(h["rescale_grad"] * g[i])
            continue
        full = clip(h["rescale_grad"] * g[i], h["clip_gradient"]) + h["wd"] * w[i]
        s["m"][i] = mu * s["m"][i] + (1 - mu) * full
        w[i] = (1 - h["lr"] * h["wd_lh"]) * w[i] - h["lr"] * sign(s["m"][i])


def dcasgd(w, g, s, t, h):
    zeros(s, len(w), "m")
    s.setdefault("previous", list(w))
    for i in range(len(w)):
        grad = clip(h["rescale_grad"] * g[i], h["clip_gradient"])
        late = h["lamda"] * grad * grad * (w[i] - s["previous"][i])
        s["m"][i] = h["momentum"] * s["m"][i] - h["lr"] * (grad + h["wd"] * w[i] + late)
        s["previous"][i] = w[i]
        w[i] += s["m"][i]


def adam(w, g, s, t, h):
    zeros(s, len(w), "m", "v")
    rate = h["lr"] * math.sqrt(1 - h["beta2"] ** t) / (1 - h["beta1"] ** t)
    for i in range(len(w)):
        grad = clip(h["rescale_grad"] * g[i] + h["wd"] * w[i], h["clip_gradient"])
        s["m"][i] = h["beta1"] * s["m"][i] + (1 - h["beta1"]) * grad
        s["v"][i] = h["beta2"] * s["v"][i] + (1 - h["beta2"]) * grad**2
        w[i] -= rate * s["m"][i] / (math.sqrt(s["v"][i]) + h["epsilon"])


def adamw(w, g, s, t, h):
    zeros(s, len(w), "m", "v")
    rate = h["lr"]
    if h["correct_bias"]:
        rate *= math.sqrt(1 - h["beta2"] ** t) / (1 - h["beta1"] ** t)
    for i in range(len(w)):
        grad = clip(h["rescale_grad"] * g[i], h["clip_gradient"])
        s["m"][i] = h["beta1"] * s["m"][i] + (1 - h["beta1"]) * grad
        s["v"][i] = h["beta2"] * s["v"][i] + (1 - h["beta2"]) * grad**2
        w[i] -= rate * (s["m"][i] / (math.sqrt(s["v"][i]) + h["epsilon"]) + h["wd"] * w[i])


def adagrad(w, g, s, t, h):
    zeros(s, len(w), "h")
    for i in range(len(w)):
        grad = clip(h["rescale_grad"] * g[i], h["clip_gradient"])
        s["h"][i] += grad**2
        w[i] += -h["lr"] * (grad / math.sqrt(s["h"][i] + h["eps"]) + h["wd"] * w[i])


def rmsprop(w, g, s, t, h):
    zeros(s, len(w), "n", "g", "delta")
    g1, g2 = h["gamma1"], h["gamma2"]
    for i in range(len(w)):
        grad = clip(h["rescale_grad"] * g[i] + h["wd"] * w[i], h["clip_gradient"])
        s["n"][i] = (1 - g1) * grad**2 + g1 * s["n"][i]
        if h["centered"]:
            s["g"][i] = (1 - g1) * grad + g1 * s["g"][i]
            below = math.sqrt(s["n"][i] - s["g"][i] ** 2 + h["epsilon"])
            s["delta"][i] = g2 * s["delta"][i] - h["lr"] * grad / below
            w[i] += s["delta"][i]
        else:
            w[i] -= h["lr"] * grad / math.sqrt(s["n"][i] + h["epsilon"])
        w[i] = clip(w[i], h["clip_weights"])


def adadelta(w, g, s, t, h):
    zeros(s, len(w), "g", "d")
    rho, eps = h["rho"], h["epsilon"]
    for i in range(len(w)):
        grad = clip(h["rescale_grad"] * g[i], h["clip_gradient"])
        s["g"][i] = rho * s["g"][i] + (1 - rho) * grad**2
        delta = math.sqrt(s["d"][i] + eps) / math.sqrt(s["g"][i] + eps) * grad
        s["d"][i] = rho * s["d"][i] + (1 - rho) * delta**2
        w[i] -= delta + h["wd"] * w[i]


def ftrl(w, g, s, t, h):
    zeros(s, len(w), "z", "n")
    for i in range(len(w)):
        grad = clip(h["rescale_grad"] * g[i], h["clip_gradient"])
        s["z"][i] += grad - (math.sqrt(s["n"][i] + grad**2) - math.sqrt(s["n"][i])) * w[i] / h["lr"]
        s["n"][i] += grad**2
        z = s["z"][i]
        below = (h["beta"] + math.sqrt(s["n"][i])) / h["lr"] + h["wd"]
        w[i] = (sign(z) * h["lamda1"] - z) / below if abs(z) > h["lamda1"] else 0.0


def norm(values) -> float:
    return math.sqrt(math.fsum(value**2 for value in values))


def lars(w, g, s, t, h):
    mu = h["momentum"]
    if h["momentum_correction"] and s.get("last"):
        mu *= h["lr"] / s["last"]
    s["last"] = h["lr"]
    w_norm, g_norm = norm(w), norm(h["rescale_grad"] * x for x in g)
    rate = h["lr"]
    if w_norm > 0 and g_norm > 0:
        rate *= h["eta"] * w_norm / (g_norm + h["wd"] * w_norm + h["eps"])
    sgd(w, g, s, t, {**h, "lr": rate}, mu)


def lamb(w, g, s, t, h):
    zeros(s, len(w), "m", "v")
    step = []
    for i in range(len(w)):
        grad = clip(h["rescale_grad"] * g[i], h["clip_gradient"])
        s["m"][i] = h["beta1"] * s["m"][i] + (1 - h["beta1"]) * grad
        s["v"][i] = h["beta2"] * s["v"][i] + (1 - h["beta2"]) * grad**2
        m, v = s["m"][i], s["v"][i]
        if h["bias_correction"]:
            m, v = m / (1 - h["beta1"] ** t), v / (1 - h["beta2"] ** t)
        step.append(m / (math.sqrt(v) + h["epsilon"]) + h["wd"] * w[i])
    r1, r2 = norm(w), norm(step)
    if h["lower_bound"]:
        r1 = max(r1, h["lower_bound"])
    if h["upper_bound"]:
        r1 = min(r1, h["upper_bound"])
    ratio = r1 / r2 if r1 > 0 and r2 > 0 else 1.0
    for i in range(len(w)):
        w[i] -= h["lr"] * ratio * step[i]


REFERENCES = {
    function.__name__: function
    for function in (
        test,
        sgd,
        nag,
        signum,
        dcasgd,
        adam,
        adamw,
        adagrad,
        rmsprop,
        adadelta,
        ftrl,
        lars,
        lamb,
    )
}
