"""The face that Horovod's users know: ``import fusionlayer.torch as hvd``."""
