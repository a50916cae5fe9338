"""Pictures of what an answer was made from, as SVG text to be put into a page."""

from .heads import draw_heads
from .kept_map import draw_kept

__all__ = ["draw_heads", "draw_kept"]
