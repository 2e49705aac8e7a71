"""Holds ``libfusionlayer_cuda.so``, which ``fusionlayer.native`` opens when a CUDA tensor arrives."""
