"""What the files of a checkpoint say."""

from typing import TYPE_CHECKING

from lockstep.lazy import names_of_modules

if not TYPE_CHECKING:
    __getattr__ = names_of_modules(
        __name__,
        {
            "capsule": ["CapsuleFacts", "KeptBatch", "RankCapsule"],
            "codec": ["decode", "encode", "tensor_names"],
            "documents": [
                "canonical",
                "check_name",
                "digest_of",
                "entry_of",
                "FileEntry",
                "FileRecord",
                "MANIFEST",
                "Manifest",
                "parse_json",
                "rank_file",
                "Saved",
                "versions",
            ],
            "index": ["ChunkMetadata", "index_from_bytes", "index_to_bytes", "TensorEntry"],
            "tensors": ["TensorFile", "TensorReader"],
        },
    )
