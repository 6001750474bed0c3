from typing import TYPE_CHECKING

from lockstep.lazy import names_of_modules

if not TYPE_CHECKING:
    __getattr__ = names_of_modules(
        __name__,
        {
            "checkpointer": ["Checkpointer"],
            "contents": ["CheckpointContents", "DataCoordinates", "FullModelSpec"],
            "deferred": ["DeferredCopies", "HostStager", "SMALL_BYTES"],
            "in_memory": ["FoldersInMemory"],
            "folders": ["CheckpointGroup", "candidates", "next_directory", "numbers", "prune", "superfluous"],
            "load": ["load_checkpoint"],
            "planner": ["group_of", "SavePlan", "SavePlanner"],
            "reader": ["Checkpoint", "create_read_items", "empty_like"],
            "save": ["plan_files", "save_checkpoint"],
            "state": ["ParameterNames"],
            "writer": ["Writer"],
        },
    )
