"""When Keras is connected, and when it is refused: each in a fresh program."""

import os
import subprocess
import sys
import textwrap

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


def run_program(text: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(text)],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
        env={**os.environ, "KERAS_BACKEND": "torch"},
    )


def test_keras_that_is_imported_inside_the_scope_is_distributed() -> None:
    done = run_program("""
        import sys
        import stratagem as sg

        sg.config.set_logical_device_configuration("cpu:0", [sg.config.LogicalDeviceConfiguration()] * 2)
        strategy = sg.MirroredStrategy()
        with strategy.scope():
            assert "keras" not in sys.modules
            import keras
            import numpy as np

            class Seen(keras.layers.Layer):
                def call(self, inputs):
                    replica = sg.get_replica_context()
                    return 0 * inputs + (replica.replica_id_in_sync_group if replica else 0)

            model = keras.Sequential([Seen()])
            print(model.predict(np.ones((4, 1)), verbose=0).flatten().tolist())
        print(type(keras.__spec__.loader).__module__)
        """)
    assert done.stdout.splitlines() == ["[0.0, 0.0, 1.0, 1.0]", "_frozen_importlib_external"], done.stderr


def test_backend_other_than_torch_is_refused_before_anything_starts() -> None:
    # No other is installed beside torch; what Keras says of itself is all that is looked at.
    done = run_program("""
        import keras
        import stratagem as sg

        keras.backend.backend = lambda: "jax"
        keras.Sequential([keras.layers.Dense(1)])
        with sg.MirroredStrategy().scope():
            keras.Sequential([keras.layers.Dense(1)])
        """)
    assert done.returncode == 1
    assert "StrategyError: Keras runs on 'jax'" in done.stderr
    assert "Set KERAS_BACKEND=torch before Keras is imported" in done.stderr


_LATE = "import stratagem, importlib.util; importlib.util.find_spec('keras'); import keras"


@pytest.mark.parametrize("imports", ["import keras, stratagem", pytest.param(_LATE, marks=pytest.mark.soak)])
def test_synchronized_normalization_is_there_before_any_scope(imports: str) -> None:
    done = run_program(f"""
        {imports}
        import numpy as np

        norm = keras.layers.BatchNormalization(synchronized=True)
        again = keras.layers.BatchNormalization.from_config(norm.get_config())
        assert again.synchronized
        x = np.arange(12, dtype="float32").reshape(6, 2) ** 2
        found = [layer(x, training=True).detach().tolist() for layer in (again, keras.layers.BatchNormalization())]
        assert found[0] == found[1], found
    """)
    assert done.returncode == 0, done.stderr


def test_workers_that_were_there_before_keras_know_its_metrics() -> None:
    done = run_program("""
        import os
        import torch
        import stratagem as sg

        os.environ.pop("KERAS_BACKEND")
        with sg.ParameterServerStrategy(num_workers=1) as strategy:
            strategy.local_results(strategy.run(lambda: torch.ones(1)))
            os.environ["KERAS_BACKEND"] = "torch"
            import keras

            with strategy.scope():
                score, mean = keras.metrics.F1Score(), keras.metrics.Mean()
            strategy.local_results(strategy.run(lambda: score.update_state(torch.eye(2), torch.eye(2))))
    """)
    assert "StrategyError: F1Score 'f1_score' makes its variables in its first update" in done.stderr
