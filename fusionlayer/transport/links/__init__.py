"""Links: one rank's connections to the others by gloo, NCCL, sockets, MPI, Horovod or peer memory."""
