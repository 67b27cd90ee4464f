"""Names of the files in the directories of runs and sweeps."""

# In the directory of a run.
RUN_FILE = "run.json"  # its RunRecord
LOSS_FILE = "loss.jsonl"  # the loss against steps and seconds
PREDICTION_FILE = "prediction.json"  # the fitted inputs for predictions of other settings, and these predictions
CONFIG_FILE = "config.yaml"  # the resolved configuration
LOG_FILE = "job.log"  # output of a job of a sweep

# In the directory of a sweep.
SUMMARY_FILE = "sweep.json"  # the outcome of all jobs
EARLIER_FOLDER = "earlier"  # earlier runs of jobs that ran again
PAGE_FILE = "report.html"
TABLE_FILE = "report.csv"
