__version__: str

from lockstep.accelerator import Accelerator as Accelerator
from lockstep.config.enums import DDPCommunicationHookType as DDPCommunicationHookType
from lockstep.config.enums import DistributedType as DistributedType
from lockstep.config.handlers import AutocastKwargs as AutocastKwargs
from lockstep.config.handlers import DataLoaderConfiguration as DataLoaderConfiguration
from lockstep.config.handlers import DistributedDataParallelKwargs as DistributedDataParallelKwargs
from lockstep.config.handlers import GradientAccumulationPlugin as GradientAccumulationPlugin
from lockstep.config.handlers import GradScalerKwargs as GradScalerKwargs
from lockstep.config.handlers import InitProcessGroupKwargs as InitProcessGroupKwargs
from lockstep.config.handlers import ProfileKwargs as ProfileKwargs
from lockstep.config.handlers import ProjectConfiguration as ProjectConfiguration
from lockstep.data.skip import skip_first_batches as skip_first_batches
from lockstep.errors import CheckpointError as CheckpointError
from lockstep.errors import NoCheckpointError as NoCheckpointError
from lockstep.launch.functions import debug_launcher as debug_launcher
from lockstep.launch.functions import notebook_launcher as notebook_launcher
from lockstep.parallel.asynchronous.diloco import DiLoCo as DiLoCo
from lockstep.parallel.asynchronous.local_sgd import LocalSGD as LocalSGD
from lockstep.parallel.asynchronous.stale import BoundedStaleness as BoundedStaleness
from lockstep.runtime.control import PartialState as PartialState
from lockstep.runtime.memory import find_executable_batch_size as find_executable_batch_size
from lockstep.runtime.seed import set_seed as set_seed
from lockstep.runtime.seed import synchronize_rng_states as synchronize_rng_states
from lockstep.watch.log import get_logger as get_logger
from lockstep.watch.progress import tqdm as tqdm
