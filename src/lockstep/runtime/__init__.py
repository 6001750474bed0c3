from typing import TYPE_CHECKING

from lockstep.lazy import names_of_modules

if not TYPE_CHECKING:
    __getattr__ = names_of_modules(
        __name__,
        {
            "clock": ["difference", "PARTS", "Parts", "StepClock"],
            "available": [
                "compare_versions",
                "has_version",
                "is_available",
                "is_bf16_available",
                "is_cuda_available",
                "is_mps_available",
                "is_npu_available",
                "is_torch_version",
                "is_wandb_available",
                "is_xpu_available",
            ],
            "control": ["split_between"],
            "failure": ["Departures", "install_excepthook", "is_consequence", "report_of"],
            "host_memory": ["free_host_bytes"],
            "memory": ["is_out_of_memory"],
            "memory_folder": ["MemoryFolder"],
            "process": [
                "check_same_versions",
                "current_runtime",
                "device_named",
                "device_number",
                "differences",
                "end_runtime",
                "Runtime",
                "start_runtime",
            ],
            "seed": ["rng_state", "set_rng_state"],
            "step": ["BatchCounts", "StepState"],
        },
    )
