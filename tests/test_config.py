import stratagem as sg

Part = sg.config.LogicalDeviceConfiguration


def test_config_has_the_names_of_tensorflow() -> None:
    names = {
        *("list_physical_devices", "list_logical_devices", "set_visible_devices", "get_visible_devices"),
        *("set_logical_device_configuration", "get_logical_device_configuration"),
        *("LogicalDeviceConfiguration", "VirtualDeviceConfiguration"),
        *("set_memory_growth", "get_memory_growth", "get_memory_info", "reset_memory_stats"),
    }
    assert names <= set(sg.config.__all__)
    assert all(hasattr(sg.config, name) for name in sg.config.__all__)


def test_program_of_the_notes_runs_on_simulated_gpus() -> None:
    sg.config.simulate_devices("GPU", 4, memory_limit=512)
    gpus = sg.config.list_physical_devices("GPU")
    for gpu in gpus:
        sg.config.set_memory_growth(gpu, True)
    sg.config.set_visible_devices(gpus[3], "GPU")
    sg.config.set_logical_device_configuration(
        gpus[3],
        [
            sg.config.VirtualDeviceConfiguration(memory_limit=128),
            sg.config.VirtualDeviceConfiguration(memory_limit=256),
        ],
    )
    assert [x.name for x in sg.config.list_logical_devices() if x.device_type == "GPU"] == [
        "/device:GPU:0",
        "/device:GPU:1",
    ]
    assert sg.config.get_memory_growth(gpus[3])
    assert sg.config.get_visible_devices("GPU") == [gpus[3]]


def test_old_name_of_the_configuration_is_the_same_class() -> None:
    assert sg.config.VirtualDeviceConfiguration is sg.config.LogicalDeviceConfiguration


def test_configuration_reads_back_what_was_set() -> None:
    assert sg.config.get_logical_device_configuration("cpu:0") is None
    sg.config.set_logical_device_configuration("cpu:0", [Part(), Part(memory_limit=64)])
    assert sg.config.get_logical_device_configuration("cpu:0") == [Part(), Part(memory_limit=64)]


def test_details_tell_model_memory_and_cores() -> None:
    details = sg.config.get_device_details("cpu:0")
    assert details.device_name
    assert details.total_memory_bytes > 0
    assert details.num_cores >= 1
    assert details.compute_capability is None
