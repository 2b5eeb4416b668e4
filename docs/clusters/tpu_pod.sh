# A TPU pod; its hosts share /mnt/runs. A killed host is lost until somebody starts it again.
gcloud compute tpus tpu-vm ssh NAME --zone=ZONE --worker=all --command='
  cd mllm
  while true; do
    .venv/bin/python train.py --config qwen25_3b_grpo.yaml --cluster mesh.fsdp=16 run_dir=/mnt/runs/grpo
    case $? in 0 | 2 | 130 | 143) break ;; esac
    sleep 10
  done'
