"""AccumAdam and AccumAdamW: state, groups and checks around the formula in `decent_dp.optim.functional`."""

from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from decent_dp.errors import ConfigurationError
from decent_dp.optim.functional import accum_adam
from decent_dp.optim.fused import supports_fused
from decent_dp.optim.hyperparameters import check_hyperparameters
from decent_dp.optim.pieces import Pieces

_TENSORS = ("first_moment", "second_moment", "gradient_mean")


class _AccumulatedAdam(Optimizer):
    """What the two optimizers share: all but the kind of weight decay."""

    decoupled_weight_decay: ClassVar[bool]

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        accum_iter: int,
        foreach: bool | None,
        fused: bool | None,
    ) -> None:
        self._pieces: dict[int, Pieces] = {}  # of each group, by its index
        super().__init__(
            params,
            {
                "lr": lr,
                "betas": betas,
                "eps": eps,
                "weight_decay": weight_decay,
                "accum_iter": accum_iter,
                "foreach": foreach,
                "fused": fused,
            },
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, after checking its hyperparameters; see torch.optim.Optimizer.add_param_group."""
        if isinstance(param_group, dict):
            group = {**self.defaults, **param_group}
            betas = group["betas"]
            if not (isinstance(betas, tuple | list) and len(betas) == 2):
                raise ConfigurationError(f"betas is {betas!r}: it must be a pair; pass for example betas=(0.9, 0.999)")
            check_hyperparameters(
                lr=group["lr"],
                beta1=betas[0],
                beta2=betas[1],
                eps=group["eps"],
                weight_decay=group["weight_decay"],
                accum_iter=group["accum_iter"],
            )
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        if group["fused"]:
            for index, parameter in enumerate(group["params"]):
                if not supports_fused(parameter):
                    self.param_groups.pop()
                    raise ConfigurationError(
                        f"fused=True with parameter {_name(group, index)} of dtype {parameter.dtype} on "
                        f"{parameter.device}: torch has no fused Adam kernel for it; pass fused=None to use it only "
                        "where it exists"
                    )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step with the gradients in `.grad`; a parameter without one is left alone.

        Args:
            closure: Evaluates the model again and returns the loss.

        Returns:
            What the closure returned, or None.

        Raises:
            ConfigurationError: A gradient is sparse.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._check_gradients()
        for index, group in enumerate(self.param_groups):
            params = [parameter for parameter in group["params"] if parameter.grad is not None]
            states = [self._state_of(parameter) for parameter in params]
            for state in states:
                state["step"] += 1
            self._pieces[index] = accum_adam(
                params,
                [parameter.grad for parameter in params],
                [state["first_moment"] for state in states],
                [state["second_moment"] for state in states],
                [state["gradient_mean"] for state in states],
                [state["step"] for state in states],
                lr=group["lr"],
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                eps=group["eps"],
                weight_decay=group["weight_decay"],
                decoupled_weight_decay=self.decoupled_weight_decay,
                accum_iter=group["accum_iter"],
                foreach=group["foreach"],
                fused=group["fused"],
                pieces=self._pieces.get(index),
            )
        return loss

    def _check_gradients(self) -> None:
        for group in self.param_groups:
            for index, parameter in enumerate(group["params"]):
                if parameter.grad is not None and parameter.grad.layout != torch.strided:
                    raise ConfigurationError(
                        f"parameter {_name(group, index)} has a gradient of layout {parameter.grad.layout}: "
                        f"{type(self).__name__} needs dense gradients; build the embedding with sparse=False"
                    )

    def _state_of(self, parameter: Tensor) -> dict[str, Any]:
        state: dict[str, Any] = self.state[parameter]
        if not state:
            state["step"] = 0
            for name in _TENSORS:
                state[name] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._pieces = {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of `AccumAdam` or `AccumAdamW`, also from the middle of a window.

        The tensors are copied, into the memory format of the parameters: later steps of either optimizer
        leave the other alone.

        Args:
            state_dict: What `state_dict()` returned.

        Raises:
            ConfigurationError: It belongs to another kind of optimizer, or to parameters of other shapes.
        """
        if any("accum_iter" not in group for group in state_dict["param_groups"]):
            raise ConfigurationError(
                "the state has no accum_iter, so another kind of optimizer wrote it: "
                f"{type(self).__name__} loads states of AccumAdam and AccumAdamW; load it into an optimizer of "
                "the kind that wrote it, or start afresh"
            )
        shapes = {
            index: parameter.shape
            for ours, theirs in zip(self.param_groups, state_dict["param_groups"], strict=False)
            for parameter, index in zip(ours["params"], theirs["params"], strict=False)
        }
        for index, state in state_dict["state"].items():
            found = {name: tuple(state[name].shape) for name in _TENSORS}
            if index in shapes and any(shape != tuple(shapes[index]) for shape in found.values()):
                raise ConfigurationError(
                    f"the state of parameter {index} has shapes {found}, the parameter has "
                    f"{tuple(shapes[index])}: they must agree; load the state into an optimizer for the same model"
                )
        super().load_state_dict(state_dict)
        for parameter, state in self.state.items():
            for name in _TENSORS:
                state[name] = torch.empty_like(parameter, requires_grad=False).copy_(state[name])


def _name(group: dict[str, Any], index: int) -> str:
    """What to call a parameter in a message."""
    return repr(group["param_names"][index]) if "param_names" in group else f"number {index} of its group"


class AccumAdam(_AccumulatedAdam):
    """Adam whose moments remember the mean gradient of a window of steps, with L2 weight decay.

    Every step moves the parameters, with moments made from the current gradient and the memory of the windows
    before; the memory itself changes at the end of a window. The formula stands at the top of
    `decent_dp.optim.functional`. Use accum_iter = 4 for 4 or 8 workers, 8 for 16 or 32; 1 is
    torch.optim.Adam, bit for bit.

    State per parameter: `step` (an int), `first_moment` M, `second_moment` V, `gradient_mean` b, in the
    parameter's dtype and memory format: half as much again as Adam. On CPUs the optimizers of a thread also share
    up to 4.5 MiB for each of torch's threads. Steps are counted on the host: not for CUDA graphs.

    Args:
        params: Parameters, named parameters or groups, as for any torch.optim.Optimizer.
        lr: η, finite, >= 0.
        betas: (β1, β2), each in [0, 1).
        eps: ε, finite, >= 0.
        weight_decay: λ, finite, >= 0, added to the gradient as λ x.
        accum_iter: s, steps in a window, >= 1.
        foreach: As in torch.optim.Adam, for parameters that the fused kernel does not serve.
        fused: None: torch's fused kernel wherever it exists. True: an error where it does not. False: never.

    Raises:
        ConfigurationError: A hyperparameter breaks its rule.

    Example:
        >>> w = torch.nn.Parameter(torch.tensor([1.0, -2.0]))
        >>> optimizer = AccumAdam([("w", w)], lr=0.5, accum_iter=2)
        >>> w.grad = torch.tensor([3.0, -0.1])
        >>> optimizer.step()
        >>> w.detach()
        tensor([ 0.5000, -1.5000])
        >>> optimizer.state[w]["gradient_mean"]
        tensor([ 1.5000, -0.0500])

    References:
        Wang et al., "From Promise to Practice: Realizing High-performance Decentralized Training", ICLR 2025,
        arXiv:2410.11998, appendix (where β1 stands in the line of V, and ε inside the root: slips of the
        print).
        Kingma and Ba, "Adam: A Method for Stochastic Optimization", ICLR 2015, arXiv:1412.6980, Algorithm 1.
    """

    decoupled_weight_decay = False

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        accum_iter: int = 4,
        *,
        foreach: bool | None = None,
        fused: bool | None = None,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, accum_iter, foreach, fused)


class AccumAdamW(_AccumulatedAdam):
    """Adam whose moments remember the mean gradient of a window of steps, with decoupled weight decay.

    As `AccumAdam`, which see, but the parameters shrink first, x ← (1 - η λ) x, and neither the moments nor
    the mean of the gradients see the decay. accum_iter = 1 is torch.optim.AdamW, bit for bit.

    Args:
        params: Parameters, named parameters or groups, as for any torch.optim.Optimizer.
        lr: η, finite, >= 0.
        betas: (β1, β2), each in [0, 1).
        eps: ε, finite, >= 0.
        weight_decay: λ, finite, >= 0.
        accum_iter: s, steps in a window, >= 1.
        foreach: As in torch.optim.Adam, for parameters that the fused kernel does not serve.
        fused: None: torch's fused kernel wherever it exists. True: an error where it does not. False: never.

    Raises:
        ConfigurationError: A hyperparameter breaks its rule.

    Example:
        >>> w = torch.nn.Parameter(torch.tensor([1.0, -2.0]))
        >>> optimizer = AccumAdamW([("w", w)], lr=0.5, weight_decay=0.2)
        >>> w.grad = torch.tensor([3.0, -0.1])
        >>> optimizer.step()
        >>> w.detach()
        tensor([ 0.4000, -1.3000])

    References:
        Wang et al., arXiv:2410.11998, appendix; see `AccumAdam`.
        Loshchilov and Hutter, "Decoupled Weight Decay Regularization", ICLR 2019, arXiv:1711.05101,
        Algorithm 2.
    """

    decoupled_weight_decay = True

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        accum_iter: int = 4,
        *,
        foreach: bool | None = None,
        fused: bool | None = None,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, accum_iter, foreach, fused)
