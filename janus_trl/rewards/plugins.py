"""Functions of the user's own that a reward is built on, such as a detector, named in the recipe."""

from collections.abc import Callable


def import_callable(path: str, reward: str, argument: str) -> Callable[[], Callable]:
    """Find `module:function` or `package.module.function`, importable from the working folder.

    Returns:
        A function without arguments that gives the one named; a class is made an instance of only then, as it may load
        a model.

    Raises:
        ValueError: Naming reward, argument and path.
    """
    from janus_trl.rewards.registry import _import_target

    if ":" not in path and "." not in path:
        raise ValueError(f"reward '{reward}': {argument} is '{path}'; write module:function.")
    try:
        target = _import_target(path)
    except ValueError as error:
        raise ValueError(f"reward '{reward}': {argument} is '{path}', which cannot be imported: {error}") from error
    return target if isinstance(target, type) else lambda: target
