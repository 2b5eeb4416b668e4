#!/bin/bash
# A process for each GPU; the job saves before its time ends, and is put into the queue again.
#SBATCH --nodes=2 --ntasks-per-node=8 --gpus-per-node=8 --time=12:00:00
#SBATCH --requeue --open-mode=append --signal=TERM@300
srun --kill-on-bad-exit=0 .venv/bin/python train.py --config qwen25_3b_grpo.yaml --cluster mesh.fsdp=16 run_dir=/shared/runs/grpo
code=$?
case $code in 0 | 2) exit $code ;; esac
scontrol requeue "$SLURM_JOB_ID"
