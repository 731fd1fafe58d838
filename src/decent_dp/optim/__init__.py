"""Local optimizers and learning-rate schedules: what each worker does with its own gradient."""

from decent_dp.optim.accum_adam import AccumAdam, AccumAdamW
from decent_dp.optim.factories import optim_fn_accum_adam, optim_fn_accum_adamw, optim_fn_adam, optim_fn_adamw
from decent_dp.optim.schedules import lr_scheduler_fn_cosine_with_warmup

__all__ = [
    "AccumAdam",
    "AccumAdamW",
    "lr_scheduler_fn_cosine_with_warmup",
    "optim_fn_accum_adam",
    "optim_fn_accum_adamw",
    "optim_fn_adam",
    "optim_fn_adamw",
]
