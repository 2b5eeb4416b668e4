"""What users of other trainers type out of habit, and the setting that does it here.

A name that is right but stands in another section is not in the table: all of the schema is searched for it.
"""

TABLE = (
    ("lr", "optimizer.learning_rate"),
    ("lr_scheduler_type lr_scheduler warmup_style", "optimizer.schedule"),
    ("warmup_ratio lr_warmup_steps_ratio lr_warmup_steps", "optimizer.warmup_steps, a number of updates"),
    ("optim", "the optimizer is AdamW"),
    ("betas adam_beta1 beta1 adam_beta2 beta2", "optimizer.b1 and optimizer.b2"),
    ("adam_epsilon", "optimizer.eps"),
    ("grad_clip", "optimizer.max_grad_norm"),
    ("max_steps num_train_steps total_training_steps", "steps, updates of the parameters"),
    ("num_train_epochs total_epochs", "data.epochs; under GRPO steps"),
    ("per_device_train_batch_size ppo_micro_batch_size_per_gpu", "micro_batch_size, of all devices together"),
    ("gradient_accumulation_steps", "micro_batch_size; as many passes follow each other as make up batch_size"),
    ("train_batch_size ppo_mini_batch_size", "batch_size, sequences in an update, completions under GRPO"),
    ("generation_batch_size", "grpo.steps_per_generation; a rollout has so many times batch_size completions"),
    ("gradient_checkpointing enable_gradient_checkpointing", "model.remat"),
    ("bf16 fp16 torch_dtype", "model.dtype, bfloat16 or float32"),
    ("model_name_or_path model_name model_path", "model.source"),
    ("tokenizer_name tokenizer_path", "model.tokenizer"),
    ("attn_implementation", "model.attention"),
    ("use_peft lora_r lora_rank lora_alpha lora_target_modules target_modules use_rslora", "model.lora, a section"),
    ("lora_dropout", "adapters have no dropout, since the sampler has none"),
    ("use_liger_kernel use_liger_loss", "head.impl, fused by default"),
    ("dataset dataset_name train_files", "data.source; under GRPO task.name with task.train, or hub with task.id"),
    ("val_files eval_dataset", "data.validation; under GRPO eval and task.test"),
    ("max_seq_length", "data.max_length; under GRPO the two lengths of rollout"),
    ("response_length max_response_length max_new_tokens", "rollout.max_completion_length"),
    ("n group_size", "grpo.num_generations"),
    ("kl_coef kl_loss_coef use_kl_loss", "grpo.beta, with grpo.reference: initial"),
    ("clip_ratio clip_ratio_low clip_ratio_high", "grpo.epsilon and grpo.epsilon_high"),
    ("clip_ratio_c delta", "grpo.dual_clip"),
    ("entropy_coeff", "grpo.entropy_coef"),
    ("ppo_epochs", "grpo.num_iterations"),
    ("loss_agg_mode importance_sampling_level", "grpo.loss_type; token-mean is dapo, sequence is gspo"),
    ("vllm_importance_sampling_cap", "grpo.importance_cap"),
    ("reward_funcs reward_weights", "task.rewards, a list of name and weight"),
    ("output_dir default_local_dir", "run_dir"),
    ("save_steps save_freq", "checkpoint.every"),
    ("save_total_limit load_best_model_at_end", "checkpoint.keep and checkpoint.keep_best"),
    ("eval_steps test_freq", "eval.every or data.validation.every"),
    ("early_stopping_patience", "data.validation.patience"),
    ("tensor_parallel_size tensor_model_parallel_size", "mesh.tp"),
    ("log_completions", "log.samples, how many of each step; all by default"),
    ("logging_steps logging_dir", "every step is logged, in run_dir"),
    ("report_to wandb_project project_name", "log.wandb, the project; TensorBoard's files are always in run_dir"),
    ("resume_from_checkpoint", "a run resumes by the same command"),
)
"""Names of settings, and what is said of them here."""

HABITS = {name: answer for names, answer in TABLE for name in names.split()}
