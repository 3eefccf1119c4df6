"""Beyond one process: drawing and labelling by Ray's actors, training by several processes.

Nothing here computes anything else than the local loops do. A shard is the unit of work; whoever makes it, it
is the same, so engines can be changed from one start to the next.
"""

from nado.distributed.drawing import draw_on_cluster
from nado.distributed.errors import EngineError
from nado.distributed.labeling import label_on_cluster

__all__ = ["EngineError", "draw_on_cluster", "label_on_cluster"]
