"""Tools around distributed training: what a machine, its hosts, their links and NCCL's logs tell about a job."""
