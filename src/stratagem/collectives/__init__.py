"""How replicas exchange tensors.

- `contract`: what every collective does
- `shared_memory`: between processes of one machine; `exchange`: its fast path for gradients
- `torch_distributed`: gloo and NCCL
- `signals`: how replicas of one machine wait for each other
"""
