__version__: str

from lockstep.accelerator import Accelerator as Accelerator
from lockstep.config.enums import DDPCommunicationHookType as DDPCommunicationHookType, DistributedType as DistributedType
from lockstep.config.handlers import AutocastKwargs as AutocastKwargs, DataLoaderConfiguration as DataLoaderConfiguration, DistributedDataParallelKwargs as DistributedDataParallelKwargs, GradScalerKwargs as GradScalerKwargs, GradientAccumulationPlugin as GradientAccumulationPlugin, InitProcessGroupKwargs as InitProcessGroupKwargs, ProfileKwargs as ProfileKwargs, ProjectConfiguration as ProjectConfiguration
from lockstep.data.skip import skip_first_batches as skip_first_batches
from lockstep.launch.functions import debug_launcher as debug_launcher, notebook_launcher as notebook_launcher
from lockstep.runtime.control import PartialState as PartialState
from lockstep.runtime.memory import find_executable_batch_size as find_executable_batch_size
from lockstep.runtime.seed import set_seed as set_seed, synchronize_rng_states as synchronize_rng_states
from lockstep.watch.log import get_logger as get_logger
from lockstep.watch.progress import tqdm as tqdm
