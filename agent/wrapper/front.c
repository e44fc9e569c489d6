/* streamd-runsc: stands where containerd, Docker or a person calls runsc, and calls runsc.
 *
 * What concerns nobody here (state, kill, exec, wait, …) is execve of the real runsc, at once: a millisecond, and nothing
 * of the process is changed: descriptors, signal dispositions and mask, limits, environment, process group. An
 * interpreter could not do that: CPython ignores SIGPIPE and SIGXFSZ from its start on, and what they were is lost.
 *
 * `create` and `start` are decided by agent/wrapper/entry.py, in a child process, so that this one stays as it was
 * found; for `run` and `restore` it looks at the bundle. Whatever that child does or suffers (no interpreter, a crash, no
 * answer in time), the command goes on as runsc would have done it; but for one that makes a container of a bundle that
 * has what only the agent may put there, which fails then (`refuse_reserved`). The child answers with one packet on a socket pair (`struct answer`), and may send three
 * descriptors that become the standard streams.
 *
 * Built with CONFIG (this program's settings), PYTHON (an interpreter's own file, no shim) and PACKAGES (the directory
 * that holds the package `agent`) defined as strings.
 */

#define _GNU_SOURCE
#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum {
	ANSWER_MAX_BYTES = 64 << 10,
	/* An interpreter starts in 30 ms; two hundred of them at once on two cores took 5 s. What waits longer hangs. */
	INTERPRETER_MS = 15000,
	SPARE_FD = 100,
	FAILED = 128, /* as runsc's own failures */
};

struct settings {
	char runsc[PATH_MAX];
	char agent_socket[PATH_MAX];
	char run_directory[PATH_MAX];
	char log_socket[PATH_MAX];
	char deadline_ms[16];
};

static struct settings settings = {
	.runsc = "/usr/local/bin/runsc",
	.agent_socket = "/run/streamd/agent/runtime.sock",
	.run_directory = "/run/streamd/runsc",
	.log_socket = "/dev/log",
	.deadline_ms = "5000",
};

/* Send a line to the system's log, or to nobody: nothing here waits for a logger. */
__attribute__((format(printf, 1, 2))) static void say(const char *format, ...)
{
	char line[1024];
	int used = snprintf(line, sizeof line, "<28>streamd-runsc[%d]: ", (int)getpid()); /* daemon, warning */
	va_list values;
	va_start(values, format);
	vsnprintf(line + used, sizeof line - used, format, values);
	va_end(values);
	struct sockaddr_un name = {.sun_family = AF_UNIX};
	int fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	if (fd < 0)
		return;
	snprintf(name.sun_path, sizeof name.sun_path, "%.107s", settings.log_socket);
	(void)sendto(fd, line, strlen(line), 0, (struct sockaddr *)&name, sizeof name);
	close(fd);
}

/* Read `key = "value"` and `key = 123` lines, the part of TOML that the settings need. What isn't understood is logged
 * and left at its default: a pod that starts plainly is better than none. */
static void read_settings(void)
{
	const struct {
		const char *key;
		char *value;
		size_t bytes;
	} known[] = {
		{"runsc", settings.runsc, sizeof settings.runsc},
		{"agent_socket", settings.agent_socket, sizeof settings.agent_socket},
		{"run_directory", settings.run_directory, sizeof settings.run_directory},
		{"log_socket", settings.log_socket, sizeof settings.log_socket},
		{"deadline_ms", settings.deadline_ms, sizeof settings.deadline_ms},
	};
	const size_t all = sizeof known / sizeof *known;
	FILE *file = fopen(CONFIG, "re");
	char line[PATH_MAX + 64];
	for (int number = 1; file && fgets(line, sizeof line, file); number++) {
		char key[32], value[PATH_MAX];
		if (line[strspn(line, " \t\r\n")] == '\0' || line[strspn(line, " \t")] == '#')
			continue;
		int end = 0; /* set when all before it was there */
		if (sscanf(line, " %31[a-z_] = \"%4095[^\"\\]\" %n", key, value, &end) != 2)
			sscanf(line, " %31[a-z_] = %15[0-9] %n", key, value, &end);
		bool is_pair = end && (line[end] == '\0' || line[end] == '#');
		size_t at = 0;
		while (is_pair && at < all && strcmp(known[at].key, key))
			at++;
		if (is_pair && at < all && strlen(value) < known[at].bytes)
			strcpy(known[at].value, value);
		else
			say("%s:%d: not understood, ignored", CONFIG, number);
	}
	if (file)
		fclose(file);
}

/* Become a program; returns only after a failure. */
static void become(char *const argv[])
{
	execv(argv[0], argv);
	say("%s: %s", argv[0], strerror(errno));
	dprintf(STDERR_FILENO, "streamd-runsc: %s: %s\n", argv[0], strerror(errno));
	_exit(FAILED);
}

/* Whether the command line may be one to decide about. Any word may be the verb: flags are told from values in
 * agent/wrapper/arguments.py. Or it names a container that runsc doesn't know, because it was answered for here. */
static bool concerns_us(char *const argv[])
{
	for (char *const *word = argv; *word; word++) {
		char path[PATH_MAX + NAME_MAX + sizeof "/answered/"];
		if (!strcmp(*word, "create") || !strcmp(*word, "start") || !strcmp(*word, "run") || !strcmp(*word, "restore"))
			return true;
		if (**word == '\0' || **word == '.' || **word == '-' || strchr(*word, '/') || strlen(*word) > NAME_MAX)
			continue;
		snprintf(path, sizeof path, "%s/answered/%.*s", settings.run_directory, NAME_MAX, *word);
		if (!access(path, F_OK))
			return true;
	}
	return false;
}

/* Find what JSON may hold without need: a letter, a digit or a dot as \u00XX, by which something could be hidden. */
static bool hides_text(const char *text, size_t bytes)
{
	for (const char *at = text; (at = memchr(at, '\\', text + bytes - at)) && text + bytes - at >= 6; at += 2) {
		char digits[3] = {at[4], at[5], '\0'};
		if (!memcmp(at + 1, "u00", 3) && strspn(digits, "0123456789abcdefABCDEF") == 2) {
			int letter = (int)strtol(digits, NULL, 16);
			if (isalnum(letter) || letter == '.')
				return true;
		}
	}
	return false;
}

/* End a command that makes a container, when its bundle has annotations that agent/wrapper/bundle.py would have taken
 * out. For when it could not: so the bytes are looked for, in whatever file runsc would read, and so is what may hide
 * them. Nothing to be looked at is runsc's to complain of. */
static void refuse_reserved(char *const argv[])
{
	static const char *const reserved[] = {
		"\"dev.gvisor.internal.checkpoint.", "\"dev.gvisor.internal.fscheckpoint."};
	const char *bundle = NULL, *is_in = NULL;
	bool creates = false, restores = false;
	for (char *const *word = argv; *word; word++) {
		const char *flag = *word + strspn(*word, "-");
		if (!creates && !strcmp(*word, "exec")) /* whose own words follow */
			return;
		creates |= !strcmp(*word, "create") || !strcmp(*word, "run");
		restores |= !strcmp(*word, "restore"); /* of a container that is there, as a rule */
		if (flag == *word || strncmp(flag, "bundle", 6))
			continue;
		if (flag[6] == '=')
			bundle = flag + 7;
		else if (!flag[6] && word[1])
			bundle = *++word;
	}
	if (creates && !bundle)
		bundle = "."; /* as runsc has it */
	if (!bundle || !(creates || restores))
		return;
	char path[PATH_MAX];
	struct stat facts;
	snprintf(path, sizeof path, "%s/config.json", bundle);
	int fd = open(path, O_RDONLY | O_NONBLOCK | O_CLOEXEC);
	if (fd < 0)
		return;
	if (!fstat(fd, &facts) && S_ISREG(facts.st_mode) && facts.st_size) {
		void *text = mmap(NULL, facts.st_size, PROT_READ, MAP_PRIVATE, fd, 0);
		for (size_t at = 0; text != MAP_FAILED && !is_in && at < sizeof reserved / sizeof *reserved; at++)
			if (memmem(text, facts.st_size, reserved[at], strlen(reserved[at])))
				is_in = reserved[at] + 1;
		if (text != MAP_FAILED && !is_in && hides_text(text, facts.st_size))
			is_in = "that are hidden by escapes, perhaps of dev.gvisor.internal.";
		if (text != MAP_FAILED)
			munmap(text, facts.st_size);
	}
	close(fd);
	if (!is_in)
		return;
	say("%s: it has annotations %s*, which only the agent may set, and they could not be taken out", path, is_in);
	dprintf(STDERR_FILENO, "streamd-runsc: %s: it has annotations %s*, which only the agent may set\n", path, is_in);
	_exit(FAILED);
}

struct answer {
	enum { PLAIN = 'p', DOUBT = 'd', WATCH = 'w', EXIT = 'e' } mode; /* DOUBT: plain, and nobody looked at the bundle */
	char *argv[ANSWER_MAX_BYTES]; /* WATCH: a command line; EXIT: the code */
	int fds[3];
	int fd_count; /* 0, or 3: the standard streams */
	char text[ANSWER_MAX_BYTES];
};

static long now_ms(void)
{
	struct timespec now;
	clock_gettime(CLOCK_MONOTONIC, &now);
	return now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

/* Receive the packet: a letter and NUL, then strings that each end with NUL. */
static bool receive(int fd, struct answer *answer)
{
	char control[CMSG_SPACE(3 * sizeof(int))];
	struct iovec part = {answer->text, sizeof answer->text};
	struct msghdr message = {
		.msg_iov = &part, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control};
	long until_ms = now_ms() + atol(settings.deadline_ms) + INTERPRETER_MS;
	struct pollfd readable = {.fd = fd, .events = POLLIN};
	for (long left_ms; (left_ms = until_ms - now_ms()) > 0;)
		if (poll(&readable, 1, (int)left_ms) > 0)
			break;
	ssize_t count = recvmsg(fd, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
	if (count < 2 || message.msg_flags & (MSG_TRUNC | MSG_CTRUNC) || answer->text[count - 1])
		return false;
	for (struct cmsghdr *head = CMSG_FIRSTHDR(&message); head; head = CMSG_NXTHDR(&message, head))
		if (head->cmsg_type == SCM_RIGHTS && head->cmsg_len == CMSG_LEN(sizeof answer->fds)) {
			memcpy(answer->fds, CMSG_DATA(head), sizeof answer->fds);
			answer->fd_count = 3;
		}
	answer->mode = (unsigned char)answer->text[0];
	size_t words = 0; /* each has a byte at least */
	for (char *at = answer->text + 2; at < answer->text + count; at += strlen(at) + 1)
		answer->argv[words++] = at;
	answer->argv[words] = NULL;
	return true;
}

/* Run entry.py for a step, `decide` or `report`, and receive what it answers. False: it gave no answer. */
static bool ask(const char *step, const char *fact, int argc, char *const argv[], struct answer *answer)
{
	static char program[] = "import sys; sys.path.insert(0, '" PACKAGES "'); "
				"from agent.wrapper.entry import main; main(sys.argv[1:])";
	int pair[2];
	pid_t front = getpid();
	if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair))
		return false;
	pid_t child = fork();
	if (child == 0) {
		/* It goes when this process goes, and whatever an interpreter prints goes nowhere: the standard streams
		 * may be the container's. It gets them under other numbers. */
		char numbers[4][16];
		prctl(PR_SET_PDEATHSIG, SIGKILL);
		if (getppid() != front)
			_exit(1);
		snprintf(numbers[3], sizeof *numbers, "%d", fcntl(pair[1], F_DUPFD, SPARE_FD));
		for (int stream = 0; stream < 3; stream++)
			snprintf(numbers[stream], sizeof *numbers, "%d", fcntl(stream, F_DUPFD, SPARE_FD));
		int nowhere = open("/dev/null", O_RDWR);
		for (int stream = 0; stream < 3; stream++)
			dup2(nowhere, stream);
		if (nowhere > 2)
			close(nowhere);
		const char *head[] = {PYTHON, "-I", "-S", "-c", program, step, fact, numbers[3], numbers[0],
				      numbers[1], numbers[2], settings.runsc, settings.agent_socket,
				      settings.deadline_ms, settings.run_directory, settings.log_socket};
		const int heads = sizeof head / sizeof *head;
		const char **vector = calloc(heads + argc + 1, sizeof *vector);
		if (!vector)
			_exit(1);
		memcpy(vector, head, sizeof head);
		memcpy(vector + heads, argv, argc * sizeof *argv);
		execv(PYTHON, (char *const *)vector);
		_exit(1);
	}
	close(pair[1]);
	bool answered = child > 0 && receive(pair[0], answer);
	close(pair[0]);
	if (child > 0 && !answered)
		kill(child, SIGKILL);
	/* One that is stuck in the kernel is not waited for; who reaps orphans will reap it. */
	for (int tries = 0; child > 0 && waitpid(child, NULL, WNOHANG) == 0 && tries < 500; tries++)
		usleep(200);
	return answered;
}

static pid_t watched;

static void forward(int number)
{
	kill(watched, number);
}

/* Run a command, let entry.py report how it ended, and end like it. Never returns. */
static void watch(char *const command[], int argc, char *const argv[], struct answer *answer)
{
	const int forwarded[] = {SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2};
	struct sigaction reaped, keep = {.sa_handler = SIG_DFL};
	pid_t front = getpid();
	int status = 0;
	sigaction(SIGCHLD, &keep, &reaped); /* a caller that ignores it would have the kernel throw the status away */
	watched = fork();
	if (watched == 0) {
		sigaction(SIGCHLD, &reaped, NULL);
		prctl(PR_SET_PDEATHSIG, SIGKILL); /* a caller that kills this process means runsc */
		if (getppid() != front)
			_exit(FAILED);
		become(command);
	}
	if (watched < 0)
		become(command);
	for (size_t at = 0; at < sizeof forwarded / sizeof *forwarded; at++) {
		struct sigaction action = {.sa_handler = forward, .sa_flags = SA_RESTART}, before;
		sigaction(forwarded[at], NULL, &before);
		if (before.sa_handler != SIG_IGN)
			sigaction(forwarded[at], &action, NULL);
	}
	while (waitpid(watched, &status, 0) < 0 && errno == EINTR)
		;
	char code[16];
	snprintf(code, sizeof code, "%d", WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status));
	if (!ask("report", code, argc, argv, answer))
		say("the outcome %s of a restore could not be reported", code);
	if (WIFSIGNALED(status)) {
		signal(WTERMSIG(status), SIG_DFL);
		raise(WTERMSIG(status));
	}
	_exit(WIFEXITED(status) ? WEXITSTATUS(status) : FAILED);
}

int main(int argc, char *argv[])
{
	static struct answer answer;
	struct stat self, real;
	read_settings();
	argv[0] = settings.runsc; /* as the caller would have called it */
	if (!stat("/proc/self/exe", &self) && !stat(settings.runsc, &real) && self.st_dev == real.st_dev &&
	    self.st_ino == real.st_ino) {
		dprintf(STDERR_FILENO, "streamd-runsc: %s names this program as the real runsc\n", CONFIG);
		return FAILED;
	}
	if (!concerns_us(argv + 1))
		become(argv);
	if (!ask("decide", "", argc - 1, argv + 1, &answer)) {
		say("no decision about `%s`: plain runsc", argv[argc - 1]);
		answer.mode = DOUBT;
	}
	if (answer.mode == DOUBT)
		refuse_reserved(argv + 1);
	for (int stream = 0; stream < answer.fd_count; stream++)
		dup2(answer.fds[stream], stream);
	if (answer.mode == EXIT && answer.argv[0])
		return atoi(answer.argv[0]);
	if (answer.mode == WATCH && answer.argv[0])
		watch(answer.argv, argc - 1, argv + 1, &answer);
	become(argv);
}
