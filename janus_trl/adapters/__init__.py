"""Adapters for published data set layouts (`dataset_format` in a recipe)."""

from janus_trl.adapters.apply import adapt, check_format
from janus_trl.adapters.layouts import FORMATS, Layout

__all__ = ["FORMATS", "Layout", "adapt", "check_format"]
