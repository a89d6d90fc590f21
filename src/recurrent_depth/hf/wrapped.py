"""Models for which a loop would come too late: something was built on them as they are."""

from torch import nn

# By name, since asking whether a part is one of them must import neither PEFT nor torch's compiler.
WRAPPERS = {
    "AveragedModel",
    "DataParallel",
    "DeepSpeedEngine",
    "DistributedDataParallel",
    "FSDPModule",
    "FullyShardedDataParallel",
    "OptimizedModule",
}


def check_bare(model: nn.Module) -> None:
    """Refuses a model that has adapters, or is wrapped, and says in which order it goes.

    What was wrapped around a host keeps to the host: an adapter's folder holds no loop, compiled code is not run
    again, and no other process hears of the new weights' gradients.

    Raises:
        ValueError: if the model or a part of it is of PEFT, compiled by `torch.compile`, distributed or averaged.
    """
    for part in model.modules():
        kinds, name = type(part).__mro__, type(part).__name__
        if any(kind.__module__.partition(".")[0] == "peft" for kind in kinds):
            raise ValueError(
                f"{type(model).__name__} has adapters ({name} is of PEFT), which would be saved without the loop. "
                "Graft first, then get_peft_model(model, ...); or merge them first: "
                "graft(model.merge_and_unload(), ...)."
            )
        if WRAPPERS & {kind.__name__ for kind in kinds}:
            raise ValueError(
                f"{name} wraps a model, and would go on with it as it was, without the loop. Graft the model itself "
                "first, then compile, distribute, prepare or average it."
            )
