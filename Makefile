# Two commands on a fresh machine: `make demo` and `make test`. Without make: scripts/bootstrap.sh demo|test|check|install
.PHONY: install demo test check

install demo test check:
	@sh scripts/bootstrap.sh $@
