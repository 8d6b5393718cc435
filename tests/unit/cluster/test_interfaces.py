from vlmrl.cluster.interfaces import interface_of, interface_variables

INTERFACES = {
    "lo": ["127.0.0.1", "::1", "00:00:00:00:00:00"],
    "eth1": ["192.168.7.4", "fe80::10%eth1", "02:42:0a:4d:00:09"],
    "eth10": ["10.77.0.2", "2001:db8::2", "fe80::11%eth10"],
}


def test_the_interface_is_the_one_that_carries_the_address() -> None:
    assert interface_of("10.77.0.2", INTERFACES) == "eth10"
    assert interface_of("192.168.7.4", INTERFACES) == "eth1"


def test_addresses_of_ipv6_are_compared_as_numbers_and_without_their_zone() -> None:
    assert interface_of("2001:0db8:0:0::2", INTERFACES) == "eth10"
    assert interface_of("fe80::10", INTERFACES) == "eth1"


def test_nothing_is_chosen_where_no_interface_has_the_address_or_the_machine_is_alone() -> None:
    assert interface_of("203.0.113.9", INTERFACES) is None
    assert interface_of("127.0.0.1", INTERFACES) is None
    assert interface_of("not an address", INTERFACES) is None
    assert interface_variables("127.0.0.1", INTERFACES, of_node={}, of_driver={}) == {}


def test_gloo_and_nccl_are_told_the_same_and_nccl_the_whole_name() -> None:
    variables = interface_variables("192.168.7.4", INTERFACES, of_node={}, of_driver={})
    assert variables == {"GLOO_SOCKET_IFNAME": "eth1", "NCCL_SOCKET_IFNAME": "=eth1"}


def test_what_the_user_set_stays_and_the_machine_knows_better_than_the_driver() -> None:
    driver = {"GLOO_SOCKET_IFNAME": "eno1", "NCCL_SOCKET_IFNAME": "ib0"}
    node = {"NCCL_SOCKET_IFNAME": "ib4"}
    found = interface_variables("10.77.0.2", INTERFACES, of_node=node, of_driver=driver)
    assert found == {"GLOO_SOCKET_IFNAME": "eno1"}
    found = interface_variables("10.77.0.2", INTERFACES, of_node=node, of_driver={"GLOO_SOCKET_IFNAME": ""})
    assert found == {"GLOO_SOCKET_IFNAME": "eth10"}
    assert interface_variables("203.0.113.9", INTERFACES, of_node={}, of_driver=driver) == driver
