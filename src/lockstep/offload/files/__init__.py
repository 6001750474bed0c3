"""Tensors in files: mapped, read and written past the page cache."""

from typing import TYPE_CHECKING

from lockstep.lazy import names_of_modules

if not TYPE_CHECKING:
    __getattr__ = names_of_modules(
        __name__,
        {
            "checkpoint_files": ["stored_tensors"],
            "direct": ["aligned_buffer", "ALIGNMENT", "OffloadFile", "region_of"],
            "offload_folder": ["index_of", "regions_of", "TensorToWrite", "write_to_folder"],
            "pages": ["file_mappings", "is_in_file", "map_file", "Pages"],
            "stored": ["MappedFiles", "read"],
        },
    )
