from typing import TYPE_CHECKING

from lockstep.lazy import names_of_modules

if not TYPE_CHECKING:
    __getattr__ = names_of_modules(
        __name__,
        {
            "arguments": ["AcceleratorArguments", "NOT_OPTIONS", "parallel_fields"],
            "enums": ["Activation", "CPMethod", "Offload", "QuantizedType", "Schedule"],
            "files": ["MAX_FILE_BYTES", "read_json", "read_plain_file"],
            "hosts": ["Host", "parse_hosts", "read_hostfile"],
            "merge": ["parallel_of", "precision_of"],
            "options": ["fit_to_world", "Options", "resolve_options"],
            "parallel": ["Parallel"],
            "readers": ["OptimizerConfig", "SchedulerConfig"],
            "run": ["RunConfig"],
            "settings": ["DECLARED", "IN_FILES", "OF_WORKERS", "Setting", "SETTINGS", "TOPICS"],
            "sources": [
                "control_endpoint",
                "named_device",
                "process_environment",
                "unknown_variables",
                "user_config_file",
                "worker_settings",
            ],
            "values": ["SettingValue"],
            "world": ["axes_of", "BatchSizes", "fitted"],
            "yaml_file": ["MAX_YAML_BYTES", "parse_yaml"],
        },
    )
