"""Modules for people who write models that are split: plain modules where there is no mesh."""

from lockstep.parallel.expert.layer import MixtureOfExperts as MixtureOfExperts
from lockstep.parallel.expert.layer import load_balance_loss as load_balance_loss
from lockstep.parallel.expert.layer import router_z_loss as router_z_loss
from lockstep.parallel.tensor.layers import ColumnParallelLinear as ColumnParallelLinear
from lockstep.parallel.tensor.layers import RowParallelLinear as RowParallelLinear
from lockstep.parallel.tensor.layers import VocabParallelEmbedding as VocabParallelEmbedding
from lockstep.parallel.tensor.loss import vocab_parallel_cross_entropy as vocab_parallel_cross_entropy
from lockstep.parallel.tensor.transformer_layers import ParallelAttention as ParallelAttention
from lockstep.parallel.tensor.transformer_layers import ParallelMLP as ParallelMLP
