/* Stands in for runsc: appends how it was called to PROGRAM.calls, and ends as PROGRAM.ending says (`exit 7`, `signal
 * 15`, `hang`), after writing PROGRAM.saying to the file after --log. The verb that PROGRAM.hanging names never ends. It
 * uses no interpreter, which would change what is to be seen. */

#define _GNU_SOURCE
#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

extern char **environ;

static void copy_lines(FILE *to, const char *path, const char *const keys[])
{
	char line[4096];
	FILE *from = fopen(path, "r");
	while (from && fgets(line, sizeof line, from))
		for (const char *const *key = keys; *key; key++)
			if (!strncmp(line, *key, strlen(*key)))
				fputs(line, to);
	if (from)
		fclose(from);
}

static void list_descriptors(FILE *to, int without)
{
	for (int fd = 0; fd < 1024; fd++) {
		char link[64], target[4096];
		snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
		ssize_t count = readlink(link, target, sizeof target - 1);
		if (count < 0 || fd == without)
			continue;
		target[count] = 0;
		fprintf(to, "fd %d %s flags %o descriptor %d\n", fd, target, fcntl(fd, F_GETFL), fcntl(fd, F_GETFD));
	}
}

static int first_number(const char *path, const char *suffix, char *word)
{
	char name[4096];
	int number = 0;
	snprintf(name, sizeof name, "%s.%s", path, suffix);
	FILE *file = fopen(name, "r");
	if (!file || fscanf(file, "%15s %d", word, &number) < 1)
		strcpy(word, "exit");
	if (file)
		fclose(file);
	return number;
}

int main(int argc, char *argv[])
{
	char exe[2048], name[2200], word[16], *text = NULL;
	size_t bytes = 0;
	ssize_t count = readlink("/proc/self/exe", exe, sizeof exe - 1);
	exe[count > 0 ? count : 0] = 0;
	FILE *report = open_memstream(&text, &bytes);
	for (int at = 0; at < argc; at++)
		fprintf(report, "argument %s\n", argv[at]);
	for (char **at = environ; *at; at++)
		fprintf(report, "environment %s\n", *at);
	list_descriptors(report, -1);
	fprintf(report, "directory %s\n", getcwd(name, sizeof name) ? name : "?");
	mode_t mask = umask(0);
	fprintf(report, "umask %o\ngroup %d session %d nice %d\n", mask, getpgid(0) == getpid(), getsid(0) == getpid(),
		getpriority(PRIO_PROCESS, 0));
	copy_lines(report, "/proc/self/status",
		   (const char *[]){"SigBlk", "SigIgn", "SigCgt", "Threads", "Uid", "Gid", "Cap", "NoNewPrivs", NULL});
	copy_lines(report, "/proc/self/limits", (const char *[]){"Max", NULL});
	copy_lines(report, "/proc/self/task/self/children", (const char *[]){"", NULL});
	snprintf(name, sizeof name, "/proc/self/task/%d/children", getpid());
	copy_lines(report, name, (const char *[]){"", NULL});
	fprintf(report, "\n\n");
	fclose(report);
	snprintf(name, sizeof name, "%s.calls", exe);
	int calls = open(name, O_WRONLY | O_CREAT | O_APPEND, 0600);
	if (write(calls, text, bytes) != (ssize_t)bytes)
		return 99;
	close(calls);

	snprintf(name, sizeof name, "%s.saying", exe);
	int saying = open(name, O_RDONLY);
	for (int at = 1; saying >= 0 && at + 1 < argc; at++)
		if (!strcmp(argv[at], "--log")) {
			char said[4096];
			int log = open(argv[at + 1], O_WRONLY | O_CREAT | O_APPEND, 0644);
			ssize_t read_bytes = read(saying, said, sizeof said);
			if (read_bytes > 0 && write(log, said, read_bytes) < 0)
				return 99;
			close(log);
		}
	int number = first_number(exe, "ending", word);
	char hanging[16];
	first_number(exe, "hanging", hanging);
	for (int at = 1; at < argc; at++)
		if (!strcmp(word, "hang") || (strcmp(hanging, "exit") && !strcmp(argv[at], hanging)))
			pause();
	if (!strcmp(word, "signal")) {
		signal(number, SIG_DFL);
		raise(number);
	}
	return number;
}
