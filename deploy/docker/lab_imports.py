"""Imports what the processes of a lab import, so that Python leaves its bytecode behind. For the image's build."""

# ruff: noqa: F401, I001
# Locust patches the interpreter: it must come before whatever imports ssl or socket.
import locust.main

import altair
import ray.dashboard.agent
import ray.serve
import transformers.models.llama
import vllm.entrypoints.openai.api_server
import vllm.model_executor.models.llama
import vllm.v1.engine.core
import vllm.v1.spec_decode.ngram_proposer
import vllm.v1.worker.cpu_worker
