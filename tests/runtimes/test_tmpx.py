def test_x(engines, steady):
    c = steady("small2","runc",mib=32)
    print(engines.run("cudackpt","doctor","--container","small2",check=False).stdout)
    print(engines.run("sh","-c","podman stats --no-stream --format '{{.MemUsage}} {{.MemUsageBytes}}' small2; cat /proc/$(podman inspect --format '{{.State.Pid}}' small2)/cgroup | grep mem; cat /proc/$(podman inspect --format '{{.State.Pid}}' small2)/status | grep -i rss").stdout)
    assert 0
