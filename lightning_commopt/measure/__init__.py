"""What a step cost: marks in the hook and in the step, and the records that are made from them."""
