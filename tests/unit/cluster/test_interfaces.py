"""Network interfaces that gloo and NCCL use."""

from vlmrl.cluster.interfaces import interface_of, interface_variables

INTERFACES = {
    "lo": ["127.0.0.1", "::1", "00:00:00:00:00:00"],
    "eth1": ["192.168.7.4", "fe80::10%eth1", "02:42:0a:4d:00:09"],
    "eth10": ["10.77.0.2", "2001:db8::2", "fe80::11%eth10"],
}


def test_the_interface_is_the_one_with_the_address() -> None:
    assert interface_of("10.77.0.2", INTERFACES) == "eth10"
    assert interface_of("192.168.7.4", INTERFACES) == "eth1"


def test_ipv6_addresses_are_compared_as_numbers_and_without_their_zone() -> None:
    assert interface_of("2001:0db8:0:0::2", INTERFACES) == "eth10"
    assert interface_of("fe80::10", INTERFACES) == "eth1"


def test_no_interface_is_chosen_for_unknown_and_loopback_addresses() -> None:
    assert interface_of("203.0.113.9", INTERFACES) is None
    assert interface_of("127.0.0.1", INTERFACES) is None
    assert interface_of("not an address", INTERFACES) is None
    assert interface_variables("127.0.0.1", INTERFACES, of_node={}, of_driver={}) == {}


def test_gloo_and_nccl_get_the_same_interface_and_nccl_its_exact_name() -> None:
    variables = interface_variables("192.168.7.4", INTERFACES, of_node={}, of_driver={})
    assert variables == {"GLOO_SOCKET_IFNAME": "eth1", "NCCL_SOCKET_IFNAME": "=eth1"}


def test_the_users_values_take_precedence_those_of_the_machine_before_the_drivers() -> None:
    driver = {"GLOO_SOCKET_IFNAME": "eno1", "NCCL_SOCKET_IFNAME": "ib0"}
    node = {"NCCL_SOCKET_IFNAME": "ib4"}
    variables = interface_variables("10.77.0.2", INTERFACES, of_node=node, of_driver=driver)
    assert variables == {"GLOO_SOCKET_IFNAME": "eno1"}
    variables = interface_variables("10.77.0.2", INTERFACES, of_node=node, of_driver={"GLOO_SOCKET_IFNAME": ""})
    assert variables == {"GLOO_SOCKET_IFNAME": "eth10"}
    assert interface_variables("203.0.113.9", INTERFACES, of_node={}, of_driver=driver) == driver
