"""What several folders of tests share: ranks to run, models, sample records and logs, a fake of CUDA."""
