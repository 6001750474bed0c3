"""What runs in the restricted process: pickled files in, JSON out. It needs the standard library only.

The process imports this folder as a package of its own, so its modules import each other relatively and
nothing of lockstep or torch.
"""
