"""Functions of the user's own that a reward is built on, such as a detector, named in the recipe."""

import os
import pkgutil
import sys
from collections.abc import Callable


def import_callable(path: str, reward: str, argument: str) -> Callable[[], Callable]:
    """Find `module:function` or `package.module.function`, importable from the working folder.

    Returns:
        A function without arguments that gives the one named; a class is made an instance of only then, as it may load
        a model.

    Raises:
        ValueError: Naming reward, argument and path.
    """
    if ":" not in path and "." not in path:
        raise ValueError(f"reward '{reward}': {argument} is '{path}'; write module:function.")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # launched scripts have their own folder on the path, not the working folder
    try:
        target = pkgutil.resolve_name(path)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"reward '{reward}': {argument} is '{path}', which cannot be imported: {error}.") from error
    if not callable(target):
        raise ValueError(f"reward '{reward}': {argument} is '{path}', which is {target!r:.60} and no function.")
    return target if isinstance(target, type) else lambda: target
