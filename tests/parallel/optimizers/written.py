"""Optimizers as people write them, and as papers print them, for plain torch."""

from __future__ import annotations

import math
from collections import OrderedDict, defaultdict

import numpy as np
import torch
from torch.optim import SGD, Adam, AdamW, Optimizer


class ByRate(Optimizer):
    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})


class LARS(Optimizer):
    """A rate for each layer by ``float`` of norms."""

    def __init__(self, params, lr=0.1, momentum=0.9, trust=0.02):
        super().__init__(params, {"lr": lr, "momentum": momentum, "trust": trust})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                weight, gradient = float(p.norm()), float(p.grad.norm())
                rate = group["lr"] * (
                    group["trust"] * weight / (gradient + 1e-9) if weight > 0 < gradient else 1
                )
                buffer = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
                buffer.mul_(group["momentum"]).add_(p.grad, alpha=rate)
                p.sub_(buffer)


class SAM(Optimizer):
    """As in davda54/sam: it shares its groups with a base optimizer, and sets ``p.data``."""

    def __init__(self, params, base=SGD, rho=0.05, **options):
        super().__init__(params, {"rho": rho, **options})
        self.base_optimizer = base(self.param_groups, **options)
        self.param_groups = self.base_optimizer.param_groups
        self.defaults.update(self.base_optimizer.defaults)

    @torch.no_grad()
    def first_step(self, zero_grad=False):
        norm = self._grad_norm()
        for group in self.param_groups:
            scale = group["rho"] / (norm + 1e-12)
            for p in group["params"]:
                if p.grad is None:
                    continue
                self.state[p]["old_p"] = p.data.clone()
                p.add_(p.grad * scale.to(p))
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def second_step(self, zero_grad=False):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                p.data = self.state[p]["old_p"]
        self.base_optimizer.step()
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def step(self, closure=None):
        assert closure is not None
        closure = torch.enable_grad()(closure)
        self.first_step(zero_grad=True)
        closure()
        self.second_step()

    def _grad_norm(self):
        shared_device = self.param_groups[0]["params"][0].device
        return torch.norm(
            torch.stack(
                [
                    p.grad.norm(p=2).to(shared_device)
                    for group in self.param_groups
                    for p in group["params"]
                    if p.grad is not None
                ]
            ),
            p=2,
        )

    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict)
        self.base_optimizer.param_groups = self.param_groups


class Lion(Optimizer):
    def __init__(self, params, lr=1e-3, betas=(0.9, 0.99), weight_decay=0.1):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                p.data.mul_(1 - group["lr"] * group["weight_decay"])
                average = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                update = average * group["betas"][0] + p.grad * (1 - group["betas"][0])
                p.add_(update.sign_(), alpha=-group["lr"])
                average.mul_(group["betas"][1]).add_(p.grad, alpha=1 - group["betas"][1])


class ElementwiseLion(Lion):
    """Says that it needs no whole parameters."""

    elementwise = True


class NotElementwise(LARS):
    """Says so wrongly."""

    elementwise = True


class Shampoo(Optimizer):
    """Preconditioners for each dim, their roots by ``eigh`` at every second step."""

    def __init__(self, params, lr=0.05, eps=1e-2, every=2):
        super().__init__(params, {"lr": lr, "eps": eps, "every": every})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state, grad = self.state[p], p.grad
                if not state:
                    state["step"] = 0
                    for dim, size in enumerate(p.shape):
                        state[f"precond_{dim}"] = group["eps"] * torch.eye(size)
                        state[f"inverse_{dim}"] = torch.eye(size)
                state["step"] += 1
                for dim, size in enumerate(p.shape):
                    matrix = grad.transpose(0, dim).reshape(size, -1)
                    state[f"precond_{dim}"].add_(matrix @ matrix.t())
                    if state["step"] % group["every"] == 0:
                        values, vectors = torch.linalg.eigh(state[f"precond_{dim}"])
                        state[f"inverse_{dim}"] = (
                            vectors @ torch.diag(values.clamp(1e-6) ** (-1 / (2 * p.ndim))) @ vectors.t()
                        )
                    matrix = state[f"inverse_{dim}"] @ matrix
                    grad = matrix.reshape(grad.transpose(0, dim).shape).transpose(0, dim)
                p.add_(grad, alpha=-group["lr"])


class CentralisedColumns(ByRate):
    """The mean over the dim along which parameters are cut."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                p.sub_(group["lr"] * (p.grad - p.grad.mean(dim=0, keepdim=True)))


class NoisySGD(SGD):
    """Langevin dynamics."""

    @torch.no_grad()
    def step(self, closure=None):
        super().step()
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(torch.randn_like(p), alpha=1e-2 * math.sqrt(group["lr"]))


class Lookahead(Optimizer):
    """Wraps another optimizer, as in lonePatient/lookahead_pytorch."""

    def __init__(self, optimizer, k=2, alpha=0.5):
        self.optimizer = optimizer
        self.param_groups = optimizer.param_groups
        self.state = defaultdict(dict)
        self.defaults = optimizer.defaults
        self.k, self.alpha, self.count = k, alpha, 0
        self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["slow"] = p.data.clone().detach()

    def step(self, closure=None):
        loss = self.optimizer.step(closure)
        self.count += 1
        if self.count % self.k == 0:
            for group in self.param_groups:
                for fast in group["params"]:
                    slow = self.state[fast]["slow"]
                    slow += (fast.data - slow) * self.alpha
                    fast.data.copy_(slow)
        return loss


class BareWrapper(Optimizer):
    """Wraps another optimizer and does not call ``super().__init__``."""

    def __init__(self, optimizer):
        self.optimizer, self.defaults = optimizer, optimizer.defaults
        self.param_groups, self.state = optimizer.param_groups, optimizer.state

    def zero_grad(self, set_to_none=True):
        self.optimizer.zero_grad(set_to_none)

    def step(self, closure=None):
        return self.optimizer.step(closure)


class ByParameter(Optimizer):
    """Buffers in a dict of its own, by parameter; gradients are taken away; a comparison of tensors decides."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})
        self.buffers = {p: torch.zeros_like(p) for p in self.param_groups[0]["params"]}

    @torch.no_grad()
    def step(self, closure=None):
        params = [p for p in self.param_groups[0]["params"] if p.grad is not None]
        norm = torch.sqrt(sum((p.grad**2).sum() for p in params))
        if norm > 1e-3:
            for p in params:
                self.buffers[p].mul_(0.5).add_(p.grad / norm)
                p.add_(self.buffers[p], alpha=-self.param_groups[0]["lr"])
                p.grad = None


class NumPySGD(ByRate):
    """Steps in NumPy, and keeps arrays in its state."""

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                array = p.grad.data.numpy()
                self.state[p]["last"] = array.copy()
                scale = group["lr"] / max(
                    1.0, float((array**2).sum()) ** 0.5, *map(abs, p.grad.flatten().tolist())
                )
                p.data = p.data - torch.from_numpy(np.asarray(scale * self.state[p]["last"]))


class AveragesModel(SGD):
    """Reads the parameters of a model, not those of its groups."""

    def __init__(self, params, model, lr=0.1):
        super().__init__(params, lr=lr)
        self.model, self.average = model, None

    @torch.no_grad()
    def step(self, closure=None):
        super().step()
        if self.average is None:
            self.average = [p.clone() for p in self.model.parameters()]
        for average, p in zip(self.average, self.model.parameters(), strict=True):
            average.lerp_(p, 0.1)


class LookAlike:
    """Steps parameters, and is no ``Optimizer``."""

    def __init__(self, params):
        self.params = list(params)

    def step(self):
        with torch.no_grad():
            for p in self.params:
                if p.grad is not None:
                    p.sub_(p.grad, alpha=0.1)

    def zero_grad(self):
        for p in self.params:
            p.grad = None


class ClippingSGD(SGD):
    """Clips by the norm of all its gradients, and skips what is not finite, inside of the step."""

    @torch.no_grad()
    def step(self, closure=None):
        params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        if not torch.stack([torch.isfinite(p.grad).all() for p in params]).all():
            return None
        norm = torch.nn.utils.clip_grad_norm_(params, 0.1)
        if norm > 1e3:
            return None
        return super().step(closure)


class Masters(Optimizer):
    """fp32 copies made when it is built, stepped in place of the weights."""

    def __init__(self, params, lr=0.05):
        super().__init__(params, {"lr": lr})
        self.masters = [[p.detach().clone().float() for p in group["params"]] for group in self.param_groups]

    @torch.no_grad()
    def step(self, closure=None):
        for group, masters in zip(self.param_groups, self.masters, strict=True):
            for p, master in zip(group["params"], masters, strict=True):
                if p.grad is not None:
                    master.sub_(p.grad.float(), alpha=group["lr"])
                    p.copy_(master)


class HoldsData(Optimizer):
    """References to ``p.data``, through which it steps."""

    def __init__(self, params, lr=0.05):
        super().__init__(params, {"lr": lr})
        self.weights = [(p, p.data) for group in self.param_groups for p in group["params"]]

    def step(self, closure=None):
        for p, data in self.weights:
            if p.grad is not None:
                data.add_(p.grad, alpha=-self.param_groups[0]["lr"])


class StateByShape(Optimizer):
    """State made in ``__init__`` from ``p.shape``."""

    def __init__(self, params, lr=0.05):
        super().__init__(params, {"lr": lr})
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["sum"] = torch.full(p.shape, 0.1)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                self.state[p]["sum"].addcmul_(p.grad, p.grad)
                p.addcdiv_(p.grad, self.state[p]["sum"].sqrt(), value=-group["lr"])


class KeepsLists(Optimizer):
    """Lists of parameters and buffers in attributes, stepped with ``torch._foreach_*``."""

    def __init__(self, params, lr=0.05):
        super().__init__(params, {"lr": lr})
        self.all = [p for group in self.param_groups for p in group["params"]]
        self.buffers = [torch.zeros_like(p) for p in self.all]

    @torch.no_grad()
    def step(self, closure=None):
        grads = [p.grad for p in self.all]
        norms = torch._foreach_norm(grads)
        scale = 1 / (1 + float(torch.stack(norms).norm()))
        torch._foreach_mul_(self.buffers, 0.9)
        torch._foreach_add_(self.buffers, grads, alpha=scale)
        torch._foreach_add_(self.all, self.buffers, alpha=-self.param_groups[0]["lr"])


class OneVector(ByRate):
    """All gradients as one vector, stepped, and put back with ``vector_to_parameters``."""

    @torch.no_grad()
    def step(self, closure=None):
        params = self.param_groups[0]["params"]
        gradient = torch.nn.utils.parameters_to_vector([p.grad for p in params])
        weights = torch.nn.utils.parameters_to_vector(params)
        top = gradient.abs().topk(len(gradient) // 2).indices
        kept = torch.zeros_like(gradient).scatter(0, top, gradient[top])
        torch.nn.utils.vector_to_parameters(weights - self.param_groups[0]["lr"] * kept, params)


class OwnGradient(ByRate):
    """Differentiates a penalty of the weights inside of its step."""

    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            with torch.enable_grad():
                copy = p.detach().clone().requires_grad_()
                (penalty,) = torch.autograd.grad(copy.square().sum().sqrt(), copy)
            with torch.no_grad():
                p.sub_(p.grad + 0.01 * penalty, alpha=self.param_groups[0]["lr"])


class ScheduleFree(Optimizer):
    """Weights that ``train`` and ``eval`` exchange."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr, "k": 0})
        self.mode = "train"

    @torch.no_grad()
    def eval(self):
        for group in self.param_groups:
            for p in group["params"]:
                if self.mode == "train" and "z" in self.state[p]:
                    p.lerp_(self.state[p]["z"], 1 - 1 / 0.9)
        self.mode = "eval"

    @torch.no_grad()
    def train(self):
        for group in self.param_groups:
            for p in group["params"]:
                if self.mode == "eval" and "z" in self.state[p]:
                    p.lerp_(self.state[p]["z"], 1 - 0.9)
        self.mode = "train"

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["k"] += 1
            for p in (p for p in group["params"] if p.grad is not None):
                z = self.state[p].setdefault("z", p.detach().clone())
                p.lerp_(z, 1 / group["k"])
                p.add_(p.grad, alpha=group["lr"] * (0.9 * (1 - 1 / group["k"]) - 1))
                z.sub_(p.grad, alpha=group["lr"])


class NormedAdam(Adam):
    """Inherits a step, and changes gradients in a method that the step calls."""

    def _init_group(self, group, *args, **kwargs):
        for p in group["params"]:
            if p.grad is not None:
                p.grad.div_(p.grad.norm() + 1e-3)
        return super()._init_group(group, *args, **kwargs)


class Renamed(AdamW):
    """Nothing but other defaults."""

    def __init__(self, params, lr=3e-3):
        super().__init__(params, lr=lr, eps=1e-3)
