"""What a round of the constructed decoder costs as the number of states grows; `python -m pa_core.scaling` measures it.

Every size runs in its own process, so that the peak memory is its own.  Times are CPU seconds of one thread.  The results
stand in `artifacts/construct_scaling.json`, which chapter 04 reads: a measured time can't be computed again to the bit.
"""

import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import torch

from .construct import ConstructedActor, ConstructedCritic, constructed_decoder
from .families import from_gymnasium, ring_mdp
from .pmd import uniform_log_policy

ROOT = Path(__file__).resolve().parent.parent
FILE = ROOT / "artifacts" / "construct_scaling.json"
SIZES = (8, 16, 32, 64, 128, 256, 512, 1024)
N_ACTIONS, DRAWS, KAPPA = 6, 2, 200.0


def _peak_memory() -> float:
    """Peak resident memory of this process in GiB."""
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**30 if sys.platform == "darwin" else peak / 2**20


def measure(task: str) -> dict[str, float | int | str]:
    """One round, actor and sampled critic, on a ring of `task` states or on the Gymnasium environment `task`."""
    torch.set_num_threads(1)
    mdp = ring_mdp(int(task), N_ACTIONS, gamma=0.9) if task.isdigit() else from_gymnasium(task, gamma=0.9)
    decoder = constructed_decoder(mdp.n_states, mdp.n_actions, routing_logit=KAPPA)
    actor, critic = ConstructedActor(decoder), ConstructedCritic(decoder, DRAWS)
    log_pi, Q = uniform_log_policy(mdp), torch.zeros_like(mdp.R)
    idle, start = _peak_memory(), time.process_time()
    log_pi = actor(log_pi, Q, 1.0)
    middle = time.process_time()
    critic(mdp, log_pi, Q, np.random.default_rng(0))
    return {
        "task": task,
        "n_states": mdp.n_states,
        "n_actions": mdp.n_actions,
        "n_tokens": mdp.n_states * mdp.n_actions * (2 + DRAWS),
        "n_parameters": decoder.n_parameters,
        "actor_s": round(middle - start, 4),
        "critic_s": round(time.process_time() - middle, 4),
        "idle_gib": round(idle, 3),
        "peak_gib": round(_peak_memory(), 3),
    }


def main() -> None:
    """Measure every size and Taxi-v4, each in a fresh process, and write the file."""
    rows = []
    for task in [*map(str, SIZES), "Taxi-v4"]:
        code = f"import json; from pa_core.scaling import measure; print(json.dumps(measure({task!r})))"
        call = [sys.executable, "-c", code]
        # A fixed threshold makes glibc give freed tensors back, else the peak depends on what it happens to keep.
        env = os.environ | {"MALLOC_MMAP_THRESHOLD_": "131072"}
        rows.append(json.loads(subprocess.run(call, check=True, capture_output=True, text=True, cwd=ROOT, env=env).stdout))
        print(rows[-1], flush=True)
    where = {"torch": torch.__version__, "machine": platform.machine(), "threads": 1, "dtype": "float64", "draws": DRAWS}
    FILE.parent.mkdir(exist_ok=True)
    FILE.write_text(json.dumps({"where": where, "rounds": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
