"""Scripts that other interpreters run are not collected here."""

collect_ignore = ["vllm_steps.py"]
